"""Gradients: the operators `flashgen::attention_backward` and `attention_tensors_backward`, which refuse to be differentiated.

The second one gives those of modifiers' tensors as well.

Whether gradients are deterministic where nobody says so is asked of PyTorch where they are computed, as its own operators do: in the
backward pass, by the operator itself, so that compiled and exported programs follow the setting of the process that runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils.flop_counter import register_flop_formula

from flashgen.codegen.errors import FlashgenError

from ..launch.asked import asked, have_gradients
from ..launch.gradients import Gradients, check_gradient_call, usable
from ..launch.laid_out import empty
from ..launch.untraced import untraced
from .gradient_plans import gradient_plan_for
from .registration import LIBRARY, cpu_is_allowed, flops_of, register_for_all_others

NO_SECOND = "flashgen.attention has no second derivative: take its gradients without create_graph=True, or use plain PyTorch there"


class NoDerivativeError(FlashgenError, NotImplementedError):
    """A derivative is asked for. As a NotImplementedError it makes torch.compile leave the call to Python, which says the same."""


_ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, "
    'bool causal, float? scale, str layout, bool? deterministic=None, str modifiers="", SymInt[] sizes=[], float[] numbers=[], '
    "Tensor[]? tensors=None)"
)
LIBRARY.define(f"attention_backward{_ARGUMENTS} -> (Tensor d_q, Tensor d_k, Tensor d_v)")
LIBRARY.define(f"attention_tensors_backward{_ARGUMENTS} -> Tensor[] gradients")
attention_backward = torch.ops.flashgen.attention_backward.default
attention_tensors_backward = torch.ops.flashgen.attention_tensors_backward.default


@untraced
def backward_on_gpu(*arguments: Any, of_tensors: bool = False) -> Gradients:
    """The operators on a GPU. of_tensors: whether gradients of modifiers' tensors are asked for, behind the others."""
    tensors, (*options, modifiers, others) = _usable(*arguments[:7]), _decided(*arguments[7:])
    return gradient_plan_for(*tensors, *options, modifiers, others, of_tensors).run(*tensors, *others)


@untraced
def _tensors_backward_on_gpu(*arguments: Any) -> list[torch.Tensor]:
    return list(backward_on_gpu(*arguments, of_tensors=True))


@untraced
def _backward_elsewhere(*arguments: Any, of_tensors: bool = False) -> Gradients:
    options = _decided(*arguments[7:])
    check_gradient_call(*arguments[:7], *options)
    cpu_is_allowed(arguments[0])
    from . import cpu

    given = (*_usable(*arguments[:7]), *options, of_tensors)
    return cpu.gradients_on_cpu(*given)


@untraced
def _tensors_backward_elsewhere(*arguments: Any) -> list[torch.Tensor]:
    return list(_backward_elsewhere(*arguments, of_tensors=True))


def _decided(causal: bool, scale: float | None, layout: str, deterministic: bool | None = None, *modified: Any) -> tuple[Any, ...]:
    """The options of a call, with PyTorch's setting where nothing was said."""
    decided = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    return causal, scale, layout, decided, *asked(*modified)


def _usable(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, d_out: torch.Tensor, d_lse: torch.Tensor | None
) -> tuple[Any, ...]:
    """What autograd gives may lie in memory in any way; what the caller gave was refused in the forward pass if kernels cannot take it."""
    lse, d_lse = lse.contiguous(), d_lse.contiguous() if d_lse is not None else None
    return q, k, v, usable("out", out), lse, usable("d_out", d_out), d_lse


def _backward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Gradients:
    check_gradient_call(q, k, v, *rest[:4], *_decided(*rest[4:]))
    return tuple(empty(tensor.shape, tensor, rest[6]) for tensor in (q, k, v))


def _tensors_backward_fake(*arguments: Any) -> list[torch.Tensor]:
    *_, modifiers, tensors = _decided(*arguments[7:])
    having = (tensor for tensor, has in zip(tensors, have_gradients(modifiers.names), strict=True) if has)
    return [*_backward_fake(*arguments), *(tensor.new_empty(tensor.shape) for tensor in having)]


@register_flop_formula([torch.ops.flashgen.attention_backward, torch.ops.flashgen.attention_tensors_backward])
def _flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], out: Sequence[int], lse: Sequence[int], d_out: Sequence[int], d_lse: Any,
    causal: bool, scale: float | None, layout: str, deterministic: bool | None = None, *modified: Any, **_: Any,
) -> int:  # fmt: skip
    """For `torch.utils.flop_counter`; shapes in place of tensors."""
    return flops_of("backward", q, k, v, causal, layout, *modified)


for _name, _cuda, _elsewhere, _fake in (
    ("attention_backward", backward_on_gpu, _backward_elsewhere, _backward_fake),
    ("attention_tensors_backward", _tensors_backward_on_gpu, _tensors_backward_elsewhere, _tensors_backward_fake),
):
    LIBRARY.impl(_name, _cuda, "CUDA")
    register_for_all_others(_name, _elsewhere)
    torch.library.register_fake(f"flashgen::{_name}", _fake, lib=LIBRARY)


def flat(arguments: Sequence[Any], options: int) -> tuple[Any, ...]:
    """Arguments of an operator, whose list of modifiers' tensors comes after so many others, with these tensors one by one.

    Autograd does not look into lists. What was left out is there, then.
    """
    there = len(arguments) - options - 1  # 0, or less where the last arguments were left out
    *others, tensors = (*arguments, *_LEFT_OUT[there:]) if there < 0 else arguments
    return *others, *(tensors or ())


def listed(arguments: Sequence[Any], options: int) -> tuple[Any, ...]:
    """The same the other way round."""
    return *arguments[:options], list(arguments[options:]) or None


_LEFT_OUT = (None, "", (), (), None)  # the last arguments of operators where they are left out: deterministic, modifiers


@untraced
def _second_autograd(operator: Any, *arguments: Any) -> Any:
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments[:7])):
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)
    return _BelowAutograd.apply(operator, *flat(arguments, 14))  # type: ignore[no-untyped-call]


class _BelowAutograd(torch.autograd.Function):
    """Gradients that may be asked for, but not differentiated, within the dispatcher."""

    @staticmethod
    @untraced
    def forward(ctx: Any, operator: Any, *arguments: Any) -> Gradients:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(operator(*listed(arguments, 14)))

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NoDerivativeError(NO_SECOND)


@untraced
def _autograd(*arguments: Any) -> Gradients:
    return _second_autograd(attention_backward, *arguments)  # type: ignore[no-any-return]


@untraced
def _tensors_autograd(*arguments: Any) -> list[torch.Tensor]:
    return list(_second_autograd(attention_tensors_backward, *arguments))


LIBRARY.impl("attention_backward", _autograd, "Autograd")
LIBRARY.impl("attention_tensors_backward", _tensors_autograd, "Autograd")
