"""Dropout in PyTorch's scaled_dot_product_attention on flashgen, by name and by PyTorch's fused operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.integrations import sdpa
from flashgen.integrations.sdpa import states
from flashgen.launch.tensors import Tensors
from flashgen.numerics.modifiers.dropout import dropout_mask
from tests.support.sdpa import SDPA, K, Q, attend, numbers, operator_of, require_form
from tests.support.sdpa import activated as activated
from tests.support.sdpa import counts as counts
from tests.support.sdpa import on_cpu as on_cpu
from tests.support.sdpa import operators as operators


def test_dropout_follows_the_seed(on_cpu: list[Tensors]) -> None:
    def dropped() -> Any:
        torch.manual_seed(5)
        return attend(numbers(*Q), numbers(*K), numbers(*K), dropout_p=0.5)

    assert dropped().equal(dropped())
    assert not dropped().equal(attend(numbers(*Q), numbers(*K), numbers(*K)))
    assert sdpa.report().run == {SDPA: 4}


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_dropout_of_a_fused_operator(on_cpu: list[Tensors], operators: list[str], name: str, rows: bool) -> None:
    """Gradients drop what the forward pass has dropped, of copies of what it saved, too."""
    tensors, p, is_flash = [numbers(*shape, rows=rows) for shape in (Q, K, K)], 0.4, name == "flash"
    bias = None if is_flash else numbers(2, 4, 6, 10, grad=False)
    arguments = (*tensors, p, is_flash, is_flash) if is_flash else (*tensors, bias, True, p)
    operator = operator_of(name)
    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        found = operator(*arguments)
    require_form((*found[:-1], None), operator, arguments)  # the fake of the last has another shape than PyTorch's own tensor
    kept = dropout_mask(states.seed_of_state(found[6]), p, *Q[:3], K[2], torch.device("cpu"))
    assert 0.45 < kept.float().mean() < 0.75
    q, k, v = (tensor.detach().float().requires_grad_() for tensor in tensors)
    hidden = torch.ones(6, 10, dtype=torch.bool).tril(4).logical_not()
    added = torch.zeros(6, 10).masked_fill(hidden, float("-inf")) if bias is None else bias.float()
    expected = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, added, p, False, kept)[0]
    wanted = torch.autograd.grad(expected, (q, k, v), torch.ones_like(expected))
    for own, other in zip((found[0], *torch.autograd.grad(found[0], tensors, torch.ones_like(found[0]))), (expected, *wanted), strict=True):
        torch.testing.assert_close(own.float(), other, atol=0.03, rtol=0.02)
    if is_flash:
        signed = found[-1]
        assert signed.shape == (2, 4, 128, 128)
        assert (signed[:, :, :6, :10][..., ~hidden] >= 0).equal(kept[..., ~hidden])
        assert signed[:, :, :6, :10][..., hidden].count_nonzero() == 0
        assert signed.count_nonzero() == 8 * (~hidden).sum()
    torch.manual_seed(7)
    assert operator(*arguments)[0].equal(found[0])
    assert not operator(*arguments)[0].equal(found[0])
    assert sdpa.report() == ({f"_scaled_dot_product_{name}_attention": 3}, {})
    assert operators == []
