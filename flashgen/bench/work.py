"""What is timed of each operation: `prepare` makes it of a peer's attention and one set of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from flashgen.codegen.errors import choice_error
from flashgen.codegen.modifier import modifier_gradients, modifier_operands
from flashgen.codegen.operands import Role
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Problem

from .caches import OF_CACHES
from .packed import BOUNDARIES

Inputs = Mapping[str, Tensor]  # by operand name, in a peer's layout
Given = Tensor | tuple[Tensor, ...]  # one output, or several in the order of the operation's operands
Attention = Callable[..., Given]  # of q, k and v, and by name the tensors of a problem's modifiers
Run = Callable[[], Given]


def prepare(problem: Problem, attention: Attention, inputs: Inputs) -> Run:
    """One call of the problem's operation on these inputs, which can be repeated.

    attention: (q, k, v, and by name the tensors of the problem's modifiers, the boundaries of packed sequences, and what says where a cache
    has the keys of a sequence) -> out, or out and what
    else it computes.
    Raises what it raises, and ArgumentError for an operation that cannot be made of attention.
    """
    if problem.operation not in _PREPARE:
        raise choice_error("pass", problem.operation, _PREPARE)
    others = {operand.name: inputs[operand.name] for operand in modifier_operands(problem)}
    others |= {name: inputs[name] for name in BOUNDARIES if problem.is_packed}
    others |= {name: inputs[name] for name in OF_CACHES if name in inputs}
    learnable = [operand.name.removeprefix("d_") for operand in modifier_gradients(problem)]
    return _PREPARE[problem.operation](attention, inputs, others, learnable)


def _forward(attention: Attention, inputs: Inputs, others: Inputs, learnable: Sequence[str]) -> Run:
    return partial(attention, inputs["q"], inputs["k"], inputs["v"], **others)


def _backward(attention: Attention, inputs: Inputs, others: Inputs, learnable: Sequence[str]) -> Run:
    """Autograd's way back through a forward pass that is done here, once. learnable: those of the others that have gradients, too."""
    leaves, more = _leaves(inputs), {name: others[name].detach().requires_grad_() for name in learnable}
    out = _differentiable(attention, leaves, {**others, **more})
    return partial(torch.autograd.grad, out, (*leaves, *more.values()), _d_out(out, inputs), retain_graph=True)


def prepare_with_backward(attention: Attention, inputs: Inputs) -> Run:
    """A forward pass and autograd's way back through it: what a layer does in training. Gives the gradients."""
    leaves = _leaves(inputs)
    d_out = _d_out(_differentiable(attention, leaves, {}), inputs)

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(_differentiable(attention, leaves, {}), leaves, d_out)

    return run


def _leaves(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (inputs[name].detach().requires_grad_() for name in ("q", "k", "v"))
    return q, k, v


def _differentiable(attention: Attention, leaves: tuple[Tensor, Tensor, Tensor], others: Inputs) -> Tensor:
    with torch.enable_grad():
        given = attention(*leaves, **others)
    return given if isinstance(given, Tensor) else given[0]


def _d_out(out: Tensor, inputs: Inputs) -> Tensor:
    """It lies in memory as out does, which is how a model has it."""
    return torch.empty_like(out, requires_grad=False).copy_(inputs["d_out"])


_PREPARE: dict[str, Callable[[Attention, Inputs, Inputs, Sequence[str]], Run]] = {"forward": _forward, "backward": _backward}


def outputs(problem: Problem, given: Given) -> dict[str, Tensor]:
    """What a run gave, by operand name."""
    names = [operand.name for operand in operation_of(problem).operands(problem) if operand.role is not Role.IN]
    return dict(zip(names, given if isinstance(given, tuple) else (given,), strict=False))  # optional ones may be left out
