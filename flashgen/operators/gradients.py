"""Gradients: the operator `flashgen::attention_backward`, which refuses to be differentiated.

Whether gradients are deterministic where nobody says so is asked of PyTorch where they are computed, as its own operators do: in the
backward pass, by the operator itself, so that compiled and exported programs follow the setting of the process that runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils.flop_counter import register_flop_formula

from flashgen.codegen.errors import FlashgenError

from ..launch.asked import asked
from ..launch.gpu import untraced
from ..launch.gradients import Gradients, check_gradient_call, usable
from . import plans
from .registration import LIBRARY, cpu_is_allowed, flops_of, register_for_all_others

NO_SECOND = "flashgen.attention has no second derivative: take its gradients without create_graph=True, or use plain PyTorch there"


class NoDerivativeError(FlashgenError, NotImplementedError):
    """A derivative is asked for. As a NotImplementedError it makes torch.compile leave the call to Python, which says the same."""


LIBRARY.define(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, "
    'bool causal, float? scale, str layout, bool? deterministic=None, str modifiers="", SymInt[] sizes=[], float[] numbers=[], '
    "Tensor[]? tensors=None) "
    "-> (Tensor d_q, Tensor d_k, Tensor d_v)"
)
attention_backward = torch.ops.flashgen.attention_backward.default


@untraced
def backward_on_gpu(*arguments: Any) -> Gradients:
    """The operator on a GPU."""
    tensors, (*options, modifiers, others) = _usable(*arguments[:7]), _decided(*arguments[7:])
    return plans.gradient_plan_for(*tensors, *options, modifiers, others)(*tensors, *others)


@untraced
def _backward_elsewhere(*arguments: Any) -> Gradients:
    options = _decided(*arguments[7:])
    check_gradient_call(*arguments[:7], *options)
    cpu_is_allowed(arguments[0])
    from . import cpu

    return cpu.gradients_on_cpu(*_usable(*arguments[:7]), *options)


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
    d_q, d_k, d_v = (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
    return d_q, d_k, d_v


@register_flop_formula(torch.ops.flashgen.attention_backward)
def _flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], out: Sequence[int], lse: Sequence[int], d_out: Sequence[int], d_lse: Any,
    causal: bool, scale: float | None, layout: str, deterministic: bool | None = None, *modified: Any, **_: Any,
) -> int:  # fmt: skip
    """For `torch.utils.flop_counter`; shapes in place of tensors."""
    return flops_of("backward", q, k, v, causal, layout, *modified)


LIBRARY.impl("attention_backward", backward_on_gpu, "CUDA")
register_for_all_others("attention_backward", _backward_elsewhere)
torch.library.register_fake("flashgen::attention_backward", _backward_fake, lib=LIBRARY)


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
def _second_autograd(*arguments: Any) -> Gradients:
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments[:7])):
        with torch._C._AutoDispatchBelowAutograd():
            return attention_backward(*arguments)  # type: ignore[no-any-return]
    return _BelowAutograd.apply(*flat(arguments, 14))  # type: ignore[no-any-return, no-untyped-call]


class _BelowAutograd(torch.autograd.Function):
    """Gradients that may be asked for, but not differentiated, within the dispatcher."""

    @staticmethod
    @untraced
    def forward(ctx: Any, *arguments: Any) -> Gradients:
        with torch._C._AutoDispatchBelowAutograd():
            return attention_backward(*listed(arguments, 14))  # type: ignore[no-any-return]

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NoDerivativeError(NO_SECOND)


LIBRARY.impl("attention_backward", _second_autograd, "Autograd")
