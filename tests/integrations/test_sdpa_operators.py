"""PyTorch's fused operators on flashgen: results, gradients, the forms of outputs, and which calls are passed on."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashgen.integrations import sdpa
from flashgen.integrations.sdpa.face import pytorch_sdpa
from flashgen.launch.tensors import Tensors
from tests.support.sdpa import FUSED, K, Q, arguments_of, in_fp32, numbers, operator_of, require_form
from tests.support.sdpa import activated as activated
from tests.support.sdpa import counts as counts
from tests.support.sdpa import on_cpu as on_cpu
from tests.support.sdpa import operators as operators


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("kind", ["plain", "causal", "bias"])
def test_a_fused_operator(on_cpu: list[Tensors], operators: list[str], name: str, kind: str, rows: bool) -> None:
    if kind == "bias" and name == "flash":
        pytest.skip("flash attention has no bias")
    shape = Q if name == "flash" or kind != "causal" or name == "cudnn" else K
    tensors = [numbers(*Q, rows=rows), *(numbers(*shape, rows=rows) for _ in "kv")]
    bias = numbers(1, 4, 6, shape[2], grad=name == "efficient").expand(2, 4, 6, shape[2]) if kind == "bias" else None
    if bias is not None and bias.requires_grad:
        bias = bias.detach().requires_grad_()
    operator, arguments = operator_of(name), arguments_of(name, tensors, bias, kind == "causal")
    found = operator(*arguments)
    require_form(found, operator, arguments)
    wanted = [tensor for tensor in (*tensors, bias) if tensor is not None and tensor.requires_grad]
    d_out = torch.ones_like(found[0])
    gradients = torch.autograd.grad(found[0], wanted, d_out)
    expected = with_expected(tensors, bias, kind == "causal")
    assert sdpa.report() == ({f"_scaled_dot_product_{name}_attention": 1}, {})
    assert operators == []
    for own, other in zip((found[0], *gradients), expected, strict=True):
        torch.testing.assert_close(own.float(), other, atol=0.03, rtol=0.02)


@pytest.mark.parametrize(("name", "head_dim_v"), [("flash", 8), ("efficient", 8), ("efficient", 16), ("cudnn", 8), ("cudnn", 16)])
def test_out_of_a_fused_operator_lies_as_its_fake_says(on_cpu: list[Tensors], operators: list[str], name: str, head_dim_v: int) -> None:
    """Of all orders of batch, heads and lengths in memory: torch.nn.MultiheadAttention has lengths first where batch_first is False."""
    for order in permutations(range(3)):
        inverse = [*sorted(range(3), key=order.__getitem__), 3]
        q, k, v = (numbers(*[(2, 4, 6)[d] for d in order], head_dim, grad=False).permute(inverse) for head_dim in (8, 8, head_dim_v))
        arguments = arguments_of(name, [q, k, v], None, False)
        require_form(operator_of(name)(*arguments), operator_of(name), arguments)
    assert operators == []


def with_expected(tensors: list[Tensor], bias: Tensor | None, is_causal: bool) -> list[Tensor]:
    own = [in_fp32(tensor) for tensor in (*tensors, bias)]
    out = pytorch_sdpa(*own[:3], own[3], is_causal=is_causal)
    return [out, *torch.autograd.grad(out, [t for t in own if t is not None and t.requires_grad], torch.ones_like(out))]


def test_packed_operator(on_cpu: list[Tensors], operators: list[str]) -> None:
    values, offsets = [numbers(14, 4, 8) for _ in "qkv"], torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    operator = torch.ops.aten._flash_attention_forward.default
    arguments = (*values, offsets, offsets, 9, 9, 0.0, True, False)
    found = operator(*arguments)
    require_form(found, operator, arguments)
    found[0].sum().backward()
    q, k, v = (tensor[5:].transpose(0, 1).detach().float().requires_grad_() for tensor in values)
    out = pytorch_sdpa(q, k, v, is_causal=True)
    out.sum().backward()
    torch.testing.assert_close(found[0][5:].transpose(0, 1).float(), out, atol=0.03, rtol=0.02)
    assert values[0].grad is not None
    torch.testing.assert_close(values[0].grad[5:].transpose(0, 1).float(), q.grad, atol=0.03, rtol=0.02)
    whole = operator(values[0][None], values[1][None], values[2][None], None, None, 14, 14, 0.0, True, False, window_size_left=3)
    assert whole[1].shape == (1, 4, 14)
    assert sdpa.report() == ({"_flash_attention_forward": 2}, {})


def test_operators_pass_on(on_cpu: list[Tensors], operators: list[str]) -> None:
    q = numbers(*Q, grad=False)
    calls = [
        (operator_of("flash"), (q, q, q, 0.0, False, True), "a dropout mask is asked for, without dropout"),
        (operator_of("cudnn"), (q, q, q, None, False, 0.5, False, True), "a dropout mask of cuDNN's operator is asked for"),
        (
            operator_of("efficient"),
            (q, q, q, None, False, 0.5),
            "dropout of efficient attention, of which torch._fill_mem_eff_dropout_mask_ tells by the seed what it drops",
        ),
        (
            torch.ops.aten._flash_attention_forward.default,
            (q, q, q, None, None, 4, 4, 0.5, False, False),
            "dropout of _flash_attention_forward",
        ),
        (operator_of("efficient"), (q.float(), q.float(), q.float(), None, False), "dtype torch.float32"),
        (operator_of("cudnn"), (numbers(*K), q, q, None, False, 0.0, True), "is_causal of cuDNN's operator where lengths differ"),
    ]
    with torch.no_grad():
        for operator, arguments, _ in calls:
            operator(*arguments)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            operator_of("efficient")(q, q, q, None, False)
    assert sdpa.report().run == {}
    expected = [*(reason for *_, reason in calls), "PyTorch's flash backend is switched off"]
    assert sorted(sdpa.report().passed_on) == sorted(expected)
    assert len(operators) == len(expected)


def test_lse_of_a_row_that_sees_no_key_is_that_of_pytorchs_kernel(on_cpu: list[Tensors], operators: list[str]) -> None:
    q, bias = numbers(*Q), torch.zeros(2, 4, 6, 6, dtype=torch.bfloat16)
    bias[:, :, 3] = float("-inf")
    bias.requires_grad_()
    out, lse, *_ = operator_of("efficient")(q, q, q, bias, True)
    assert lse[:, :, 3].abs().max() == 0
    out.sum().backward()
    assert q.grad is not None
    assert bias.grad is not None
    assert q.grad.isfinite().all()
    assert bias.grad[:, :, 3].abs().max() == 0
