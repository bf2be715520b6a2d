"""Whose backward pass PyTorch's fused operators run: the state of random numbers says who has run the forward pass."""

from __future__ import annotations

import pytest
import torch

from flashgen.integrations.sdpa import activation
from flashgen.launch.tensors import Tensors
from tests.support.sdpa import FUSED, Q, arguments_of, numbers, operator_of
from tests.support.sdpa import activated as activated
from tests.support.sdpa import counts as counts
from tests.support.sdpa import on_cpu as on_cpu
from tests.support.sdpa import operators as operators


def test_backward_is_by_whoever_ran_forward(on_cpu: list[Tensors], operators: list[str]) -> None:
    q = numbers(*Q)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    with torch.no_grad():
        out, lse, *others, seed, unused, _ = operator_of("flash")(q, q, q)
        assert seed.data_ptr() % 16 == 0  # Inductor asks for that
        backward(out, q, q, q, out, lse, *others, 0.0, False, torch.zeros(2, dtype=torch.uint64), unused)
        assert operators == ["_scaled_dot_product_flash_attention_backward"]
        backward(out, q, q, q, out, lse, *others, 0.0, False, seed, unused)
        assert len(operators) == 1
        assert len(on_cpu) == 2


@pytest.mark.parametrize("name", FUSED)
def test_backward_is_flashgens_of_copies_and_behind_an_activation(
    on_cpu: list[Tensors], activated: tuple[activation.Activation, list[str]], name: str
) -> None:
    active, passed_on = activated
    q, operator = numbers(*Q), operator_of(name)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        out = operator(*arguments_of(name, [q, q, q], None, False))[0]
    active.remove()
    out.sum().backward()
    assert passed_on == []
    assert len(on_cpu) == 2
    operator(*arguments_of(name, [q, q, q], None, False))
    assert passed_on == [f"_scaled_dot_product_{name}_attention"]


def test_another_implementation_may_have_the_operators(on_cpu: list[Tensors], activated: tuple[activation.Activation, list[str]]) -> None:
    q, name = numbers(*Q), "_scaled_dot_product_flash_attention_backward"
    out = operator_of("flash")(q, q, q)[0]
    activated[0].remove()
    other = torch.library.Library("aten", "IMPL", "CPU")
    other.impl(name, lambda d_out, q, *_, **__: (q, q, q), "CPU")  # PyTorch refuses that where Python has registered one already
    with torch.no_grad():
        state = torch.zeros(2, dtype=torch.int64)
        arguments = (out, q, q, q, out, out, None, None, 6, 6, 0.0, False, state, state[0])
        assert getattr(torch.ops.aten, name)(*arguments)[0] is q
        other._destroy()
    out.sum().backward()
    assert len(on_cpu) == 2
    assert activated[1] == []
