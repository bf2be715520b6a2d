"""PyTorch's scaled_dot_product_attention on flashgen, on a GPU: calls of models' shapes, each way by which a call comes, training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from flashgen.integrations import sdpa
from flashgen.integrations.sdpa import states
from flashgen.integrations.sdpa.face import pytorch_sdpa
from flashgen.numerics.modifiers.dropout import dropout_mask

pytestmark = pytest.mark.gpu
SDPA = "scaled_dot_product_attention"
FUSED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@pytest.fixture(autouse=True)
def _counts() -> Iterator[None]:
    sdpa.report(reset=True)
    yield
    sdpa.deactivate()
    torch._dynamo.reset()


def numbers(*shape: int, grad: bool = True, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator).requires_grad_(grad)


def views(batch: int, heads: int, length: int, head_dim: int, seed: int = 0) -> Tensor:
    """[batch, heads, len, head_dim] as models make it of [batch, len, heads * head_dim]."""
    return numbers(batch, length, heads, head_dim, grad=False, seed=seed).transpose(1, 2).requires_grad_()


def judge(tensors: list[Tensor | None], **options: Any) -> None:
    """A call of the name, with gradients, against fp32: at most twice plain PyTorch's error, by maximum, plus rounding."""

    def with_gradients(call: Callable[..., Tensor], given: list[Tensor | None]) -> list[Tensor]:
        out = call(*given, **options)
        d_out = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(9)).to(out.dtype)
        return [out, *torch.autograd.grad(out, [t for t in given if t is not None and t.requires_grad], d_out)]

    def in_fp32(tensor: Tensor | None) -> Tensor | None:
        return tensor.detach().float().requires_grad_(tensor.requires_grad) if tensor is not None and tensor.is_floating_point() else tensor

    with sdpa.enabled():
        found = with_gradients(functional.scaled_dot_product_attention, tensors)
    with sdpa_kernel(SDPBackend.MATH):
        exact = with_gradients(pytorch_sdpa, [in_fp32(tensor) for tensor in tensors])
        plain = with_gradients(pytorch_sdpa, tensors)
    for own, ref, other in zip(found, exact, plain, strict=True):
        noise = 2 * ((ref + 0.3 - 0.3) - (ref.to(own.dtype) + 0.3 - 0.3).float()).abs().max()
        assert (own.float() - ref).abs().max() <= 2 * (other.float() - ref).abs().max() + noise


def padding(batch: int, length: int) -> Tensor:
    used = torch.randint(length // 4, length, (batch,), device="cuda")
    return torch.arange(length, device="cuda") < used[:, None]


def bert() -> tuple[list[Tensor | None], dict[str, Any]]:
    return [*(views(8, 12, 384, 64, seed) for seed in range(3)), padding(8, 384)[:, None, None]], {}


def bert_additive() -> tuple[list[Tensor | None], dict[str, Any]]:
    mask = torch.zeros(8, 1, 1, 384, device="cuda", dtype=torch.bfloat16)
    mask.masked_fill_(~padding(8, 384)[:, None, None], torch.finfo(torch.bfloat16).min)
    return [*(views(8, 12, 384, 64, seed) for seed in range(3)), mask], {}


def t5() -> tuple[list[Tensor | None], dict[str, Any]]:
    return [*(views(4, 12, 256, 64, seed) for seed in range(3)), numbers(1, 12, 256, 256, seed=4)], {"scale": 1.0}


def sdxl() -> tuple[list[Tensor | None], dict[str, Any]]:
    return [views(2, 10, 1024, 64, 0), views(2, 10, 77, 64, 1), views(2, 10, 77, 64, 2)], {}


def grouped() -> tuple[list[Tensor | None], dict[str, Any]]:
    mask = torch.ones(300, 300, device="cuda", dtype=torch.bool).tril()
    return [views(2, 8, 300, 64, 0), views(2, 2, 300, 64, 1), views(2, 2, 300, 64, 2), mask], {"enable_gqa": True}


@pytest.mark.parametrize("made", [bert, bert_additive, t5, sdxl, grouped], ids=lambda made: made.__name__)
def test_shapes_of_models(made: Callable[[], tuple[list[Tensor | None], dict[str, Any]]]) -> None:
    tensors, options = made()
    judge(tensors, **options)
    assert sdpa.report() == ({SDPA: 1}, {})


@pytest.mark.parametrize("name", FUSED)
def test_outputs_have_the_form_of_pytorchs(name: str) -> None:
    """Of PyTorch's kernels themselves, where they run: shapes, strides, dtypes and devices, for tensors that lie in both ways."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    for tensors in ([numbers(2, 4, 100, 64, grad=False)] * 3, [views(2, 4, 100, 64).detach()] * 3):
        arguments = (*tensors, 0.0, True) if name == "flash" else (*tensors, None, True, 0.0, True)
        expected = operator(*arguments)
        with sdpa.enabled():
            found = operator(*arguments)
        for i, (own, other) in enumerate(zip(found, expected, strict=True)):
            if isinstance(other, Tensor) and isinstance(own, Tensor) and i < 2:
                assert (own.shape, own.stride(), own.dtype, own.device) == (other.shape, other.stride(), other.dtype, other.device)
        torch.testing.assert_close(found[0], expected[0], atol=0.02, rtol=0.02)
        rows = tensors[0].shape[2]
        torch.testing.assert_close(found[1].flatten(2)[..., :rows], expected[1].flatten(2)[..., :rows], atol=0.02, rtol=0.02)
    assert sum(sdpa.report().run.values()) == 2


def test_each_way_by_which_a_call_comes() -> None:
    q = numbers(2, 4, 128, 64)
    mask = padding(2, 128)[:, None, None]

    def call(q: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.scaled_dot_product_attention(q, q, q, mask, is_causal=mask is None) * 2

    compiled = torch.compile(call, fullgraph=True)
    expected, masked = compiled(q), compiled(q, mask)  # before
    with sdpa.enabled():
        sdpa.report(reset=True)
        torch.testing.assert_close(compiled(q), expected, atol=0.05, rtol=0.05)
        torch.testing.assert_close(compiled(q, mask), masked, atol=0.05, rtol=0.05)
        assert sum(sdpa.report(reset=True).run.values()) == 2
        torch._dynamo.reset()
        compiled(q).sum().backward()
        compiled(q, mask).sum().backward()
        assert sum(sdpa.report(reset=True).run.values()) == 2
        pytorch_sdpa(q, q, q, mask).sum().backward()  # a name that was bound before
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        odd = numbers(2, 4, 128, 60)
        functional.scaled_dot_product_attention(odd, odd, odd).sum().backward()  # which PyTorch pads
        functional.scaled_dot_product_attention(q, q[:, :, :100], q[:, :, :100], causal_lower_right(128, 100))
        assert sum(sdpa.report(reset=True).run.values()) == 4
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            functional.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(compiled(q), expected, atol=0.05, rtol=0.05)
    assert sdpa.report().run == {}
    assert odd.grad is not None


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_dropout_of_operators(name: str) -> None:
    """Out and gradients are those of the elements that the state keeps: at most twice the error of PyTorch's bf16, plus rounding."""
    tensors, p, is_flash = [views(2, 4, 300, 64, seed) for seed in range(3)], 0.2, name == "flash"
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    with sdpa.enabled():
        found = operator(*tensors, p, True, True) if is_flash else operator(*tensors, None, True, p, True)
    kept = dropout_mask(states.seed_of_state(found[6]), p, 2, 4, 300, 300, found[0].device)
    if is_flash:
        assert (found[-1][:, :, :300, :300] >= 0).equal(kept | torch.ones(300, 300, dtype=torch.bool, device="cuda").triu(1))
    d_out = torch.randn_like(found[0])

    def by_math(dtype: torch.dtype) -> list[Tensor]:
        own = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        out = torch.ops.aten._scaled_dot_product_attention_math(*own, None, p, True, kept)[0]
        return [out, *torch.autograd.grad(out, own, d_out.to(dtype))]

    exact, plain = by_math(torch.float32), by_math(torch.bfloat16)
    for own, ref, other in zip([found[0], *torch.autograd.grad(found[0], tensors, d_out)], exact, plain, strict=True):
        assert (own.float() - ref).abs().max() <= 2 * (other.float() - ref).abs().max() + 2**-8 * ref.abs().max()
    assert sum(sdpa.report().run.values()) == 1


@pytest.mark.parametrize("way", ["bound", "compiled", "on cpu"])
def test_gradients_drop_what_the_forward_pass_dropped(way: str) -> None:
    """The backward pass runs behind the activation. Out is linear in value, so that <d_out, out> is <value, d_value>."""
    query, key, value = (numbers(2, 4, 256, 64, seed=seed) for seed in range(3))

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)

    compiled = torch.compile(call, fullgraph=True)
    compiled(query, key, value)  # before
    with sdpa.enabled(), torch.autograd.graph.save_on_cpu() if way == "on cpu" else contextlib.nullcontext():
        out = compiled(query, key, value) if way == "compiled" else pytorch_sdpa(query, key, value, dropout_p=0.5)
    d_out = torch.randn_like(out)
    (d_value,) = torch.autograd.grad(out, value, d_out)
    products, others = (d_out.double() * out.double()).sum(), (value.double() * d_value.double()).sum()
    assert abs(products - others) <= 0.02 * (d_out.double() * out.double()).square().sum().sqrt()
    assert sum(sdpa.report().run.values()) == 1
    assert sdpa.report().passed_on == {}


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_a_captured_dropout_differs_in_each_replay(name: str) -> None:
    q = numbers(2, 4, 256, 64, grad=False)
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    arguments = (q, q, q, 0.5, False, True) if name == "flash" else (q, q, q, None, True, 0.5)
    with sdpa.enabled():
        operator(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = operator(*arguments)
    outs = []
    for _ in range(2):
        graph.replay()
        outs.append(found[0].clone())
        kept = dropout_mask(states.seed_of_state(found[6]), 0.5, 2, 4, 256, 256, q.device)
        exact = torch.ops.aten._scaled_dot_product_attention_math(*3 * [q.float()], None, 0.5, False, kept)[0]
        torch.testing.assert_close(found[0].float(), exact, atol=0.03, rtol=0.03)
        assert name != "flash" or (found[-1] >= 0).equal(kept)
    assert not outs[0].equal(outs[1])


@pytest.mark.parametrize("is_empty", [False, True])
def test_jagged_tensors(is_empty: bool) -> None:
    """is_empty: whether a sequence is, with which PyTorch asks none of its flash operators, in compiled graphs either."""
    offsets = torch.tensor([0, 50, 50 if is_empty else 90, 300], device="cuda")
    nested = [torch.nested.nested_tensor_from_jagged(numbers(300, 4, 64, seed=i), offsets=offsets).transpose(1, 2) for i in range(3)]
    pytorch: Any = pytorch_sdpa
    expected = pytorch(*nested, is_causal=True).transpose(1, 2).values()
    whole = pytorch(*nested).transpose(1, 2).values()
    compiled: Any = torch.compile(lambda *given: functional.scaled_dot_product_attention(*given))
    with sdpa.enabled():
        face: Any = functional.scaled_dot_product_attention
        torch.testing.assert_close(face(*nested, is_causal=True).transpose(1, 2).values(), expected, atol=0.02, rtol=0.02)
        torch.testing.assert_close(compiled(*nested).transpose(1, 2).values(), whole, atol=0.02, rtol=0.02)
    assert sdpa.report().run == {SDPA: 1} | ({} if is_empty else {"_flash_attention_forward": 1})


def test_modules_of_pytorch() -> None:
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True, device="cuda", dtype=torch.bfloat16)
    encoder = torch.nn.TransformerEncoder(layer, 2)
    x, hidden = numbers(4, 128, 256), ~padding(4, 128)
    attention = torch.nn.MultiheadAttention(256, 4, batch_first=True, device="cuda", dtype=torch.bfloat16)
    expected = encoder(x, src_key_padding_mask=hidden)
    with sdpa.enabled():
        found = encoder(x, src_key_padding_mask=hidden)
        found.sum().backward()
        attention(x, x, x, need_weights=False)[0].sum().backward()
        assert sdpa.report(reset=True) == ({SDPA: 3}, {})
        with torch.no_grad():
            attention.eval()(x, x, x, need_weights=False)  # in C++
            fast = encoder.eval()(x, src_key_padding_mask=hidden)  # as nested tensors, in C++
    torch.testing.assert_close(found[~hidden], expected[~hidden], atol=0.05, rtol=0.05)
    torch.testing.assert_close(fast[~hidden[:, : fast.shape[1]]], expected[~hidden], atol=0.05, rtol=0.05)
    assert sum(sdpa.report().run.values()) >= 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(256, 768), torch.nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_training_with_autocast_and_checkpointing(is_compiled: bool) -> None:
    def losses(active: bool) -> list[float]:
        torch.manual_seed(0)
        blocks = torch.nn.ModuleList(Block() for _ in range(3)).cuda()
        optimizer, x = torch.optim.AdamW(blocks.parameters(), 1e-3), torch.randn(4, 200, 256, device="cuda")

        def loss_of(x: Tensor) -> Tensor:
            for block in blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return (x - x.roll(1, 1)).square().mean()

        step, found = torch.compile(loss_of) if is_compiled else loss_of, []
        for _ in range(20):
            with torch.autocast("cuda", torch.bfloat16):
                loss = step(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    expected = losses(False)
    torch._dynamo.reset()
    with sdpa.enabled():
        found = losses(True)
    assert sum(sdpa.report().run.values()) >= 60
    assert sdpa.report().passed_on == {}
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=0, rtol=0.01)


def test_rows_that_see_no_key() -> None:
    """They are 0 by name, and where PyTorch hands -inf to an operator. To cuDNN's it may hand numbers: then they are PyTorch's own."""
    q = numbers(1, 2, 64, 64)
    mask = torch.ones(64, 64, device="cuda", dtype=torch.bool).tril(-1)  # the first query sees none
    pytorch = pytorch_sdpa(q, q, q, mask)
    with sdpa.enabled():
        of_name = functional.scaled_dot_product_attention(q, q, q, mask)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            of_efficient = pytorch_sdpa(q, q, q, mask)
        of_any = pytorch_sdpa(q, q, q, mask)
        assert sum(sdpa.report().run.values()) == 3
        for found in (of_name, of_efficient):
            assert found[:, :, 0].abs().max() == 0
        torch.testing.assert_close(of_any, pytorch, atol=0.02, rtol=0.02)
        for found in (of_name, of_efficient, of_any):
            (gradient,) = torch.autograd.grad(found.sum(), q)
            assert gradient.isfinite().all()
