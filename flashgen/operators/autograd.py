"""Autograd of attention: what tells PyTorch's autograd and torch.func of the gradients.

Calls come here in three ways. `attention` is an operator with an autograd kernel, for PyTorch's tracers. What nobody listens to goes past
the dispatcher, forward and backward. Transforms of torch.func take a Function with `setup_context`, and only from outside of the
dispatcher. Derivatives of gradients, and forward-mode ones, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from ..launch.asked import asked, have_gradients, names_with_gradients, require_gradients
from ..launch.gpu import Plan
from ..launch.gradients import Gradients
from ..launch.untraced import untraced
from . import plans
from .batching import batched, refuse_mapped_gradients
from .gradients import (
    NO_SECOND,
    NoDerivativeError,
    attention_backward,
    attention_tensors_backward,
    backward_on_gpu,
    flat,
    listed,
)
from .registration import LIBRARY, attention_forward, without_deterministic

_NO_TANGENTS = "flashgen.attention has no forward-mode derivative: call it with the primals of its inputs"
_NOT_COMPILED = (
    "flashgen.attention has no gradients for torch.func within torch.compile: compile what is differentiated, not the differentiation"
)
_NOT_THE_OPERATOR = "torch.ops.flashgen.attention has no gradients for torch.func: call flashgen.attention"


# torch.compile knows what this one gives, and takes `peek_interpreter_stack` for an object even where it gives None.
is_transformed = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def is_differentiated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether derivatives of a call may be asked for."""
    level = getattr(forward_ad, "_current_level", None)  # a private name: without it every call is looked at
    if level is None or level >= 0:
        if level is not None and torch.compiler.is_compiling():
            raise NoDerivativeError(_NO_TANGENTS)  # tangents cannot be seen here, and the compiled call would drop them
        return True
    if is_transformed():
        return True
    needed = q.requires_grad or k.requires_grad or v.requires_grad or any(tensor.requires_grad for tensor in others)
    return needed and torch.is_grad_enabled()


class _NoSecondDerivative(torch.autograd.Function):
    """Gradients that may be asked for, but not differentiated."""

    @staticmethod
    @untraced
    def forward(*arguments: Any) -> Gradients:
        return _backward(False, *arguments)

    @staticmethod
    @untraced
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NoDerivativeError(NO_SECOND)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NoDerivativeError(NO_SECOND)

    @staticmethod
    @untraced
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return batched(_NoSecondDerivative.apply, 7, 14)(info, in_dims, *arguments)


class _NoSecondDerivativeOfTensors(_NoSecondDerivative):
    """The same with gradients of modifiers' tensors."""

    @staticmethod
    @untraced
    def forward(*arguments: Any) -> Gradients:
        return _backward(True, *arguments)

    @staticmethod
    @untraced
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> NoReturn:
        refuse_mapped_gradients()


def _without_second(of_tensors: bool, *arguments: Any) -> Gradients:
    function = _NoSecondDerivativeOfTensors if of_tensors else _NoSecondDerivative
    return function.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


def _keep(ctx: Any, inputs: Sequence[Any], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """`inputs`: q, k, v, seven options, the modifiers' tensors."""
    ctx.save_for_backward(*inputs[:3], *output, *inputs[_OPTIONS:])
    ctx.options = inputs[3:_OPTIONS]
    ctx.set_materialize_grads(False)


def _gradients(compute: Any, ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Those of the inputs that need one, None for the others.

    `compute` is told whether gradients of modifiers' tensors are wanted, and takes these tensors one by one.
    """
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    of_options, needed = (None,) * len(ctx.options), ctx.needs_input_grad
    needed_of_tensors = needed[len(needed) - len(tensors) :]
    if d_out is None and d_lse is None:
        return (None,) * 3 + of_options + (None,) * len(tensors)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    *options, names, sizes, numbers = ctx.options
    if any(needed_of_tensors):
        names = names_with_gradients(names, tuple(needed_of_tensors))
    of_modifiers = names, sizes, numbers
    d_q, d_k, d_v, *others = compute(any(needed_of_tensors), q, k, v, out, lse, d_out, d_lse, *options, *of_modifiers, *tensors)
    of_tensors: list[torch.Tensor | None] = [None] * len(tensors)
    if others:
        having = [i for i, has in enumerate(have_gradients(asked(names, sizes, numbers, tensors)[0].names)) if has]
        for i, gradient in zip(having, others, strict=True):
            of_tensors[i] = gradient if needed_of_tensors[i] else None
    wanted = (gradient if need else None for gradient, need in zip((d_q, d_k, d_v), needed, strict=False))
    return (*wanted, *of_options, *of_tensors)


def _backward(of_tensors: bool, *arguments: Any) -> Gradients:
    return tuple((attention_tensors_backward if of_tensors else attention_backward)(*listed(arguments, 14)))


_OPTIONS = 10  # arguments of `attention` before its modifiers' tensors


_with_list = without_deterministic(attention_forward)


@untraced
def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_list(*listed(arguments, _OPTIONS))  # type: ignore[no-any-return]


class _Traced(torch.autograd.Function):
    """Within the dispatcher, for PyTorch's tracers: forward and backward are operators."""

    @staticmethod
    @untraced
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given: tuple[torch.Tensor, torch.Tensor] = _forward(*arguments)
        _keep(ctx, arguments, given)
        return given

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        return _gradients(_backward, ctx, *gradients)


class _Transformed(torch.autograd.Function):
    """From outside of the dispatcher, for the transforms of torch.func."""

    @staticmethod
    @untraced
    def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return _forward(*arguments)

    @staticmethod
    @untraced
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        return _gradients(_without_second, ctx, *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NoDerivativeError(_NO_TANGENTS)

    @staticmethod
    @untraced
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return batched(_Transformed.apply, 3, _OPTIONS)(info, in_dims, *arguments)


def _backward_alone(of_tensors: bool, *arguments: Any) -> Gradients:
    return backward_on_gpu(*listed(arguments, 14), of_tensors=of_tensors)


class _PastDispatcher(torch.autograd.Function):
    """Past the dispatcher, for tensors that `plans.only_the_kernel` says nobody else has an interest in."""

    @staticmethod
    @untraced
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # The plan is this thread's for the tensors and the options.
        out, lse = plan.run(q, k, v, True, *others[_OPTIONS - 3 :])
        assert lse is not None
        _keep(ctx, (q, k, v, *others), (out, lse))
        return out, lse

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        # Gradients are enabled where a second derivative may be asked for; a negated view is one that the dispatcher negates first.
        plain = all(g is None or (type(g) is torch.Tensor and not g.is_neg()) for g in gradients)
        alone = plain and not torch.is_grad_enabled() and plans.nobody_listens()
        d_q, d_k, d_v, *others = _gradients(_backward_alone if alone else _backward, ctx, *gradients)
        return d_q, d_k, d_v, None, *others  # the plan has none


@untraced
def _autograd(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, others = arguments[:3], flat(arguments, _OPTIONS)[_OPTIONS:]
    if getattr(forward_ad, "_current_level", 0) >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in (*tensors, *others)):
        raise NoDerivativeError(_NO_TANGENTS)  # PyTorch would drop them without a word
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *others))):
        return _with_list(*arguments)  # type: ignore[no-any-return]
    if others:
        names, sizes, numbers = flat(arguments, _OPTIONS)[7:_OPTIONS]
        require_gradients(asked(names, sizes, numbers, others)[0].names, others)
    if is_transformed():
        raise NoDerivativeError(_NOT_COMPILED if torch.compiler.is_compiling() else _NOT_THE_OPERATOR)
    return _Traced.apply(*flat(arguments, _OPTIONS))  # type: ignore[no-any-return, no-untyped-call]


LIBRARY.impl("attention", _autograd, "Autograd")
attention = torch.ops.flashgen.attention.default


@untraced
def differentiable_attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call of which derivatives may be asked for: `is_differentiated`."""
    if is_transformed():
        if torch.compiler.is_compiling():
            raise NoDerivativeError(_NOT_COMPILED)  # PyTorch 2.11 would compile gradients of 0 without a word
        return _Transformed.apply(*flat(arguments, _OPTIONS))  # type: ignore[no-any-return, no-untyped-call]
    q, k, v, *options = flat(arguments, _OPTIONS)
    tensors = options[_OPTIONS - 3 :]
    if tensors and not torch.compiler.is_compiling():  # there the operator says it
        require_gradients(asked(options[4], options[5], options[6], tensors)[0].names, tensors)
    if not torch.compiler.is_compiling() and plans.only_the_kernel(q, k, v, *tensors):
        options = options[: _OPTIONS - 3]
        causal, scale, layout, deterministic, names, sizes, numbers = options
        modifiers, _ = asked(names, sizes, numbers, tensors)
        plan = plans.plan_for(q, k, v, causal, scale, layout, modifiers, tuple(tensors))

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: bool, *tensors: torch.Tensor) -> Any:
            return _PastDispatcher.apply(q, k, v, plan, *options, *tensors)  # type: ignore[no-untyped-call]

        plans.remember_differentiable(plan, run, (q, k, v, *tensors), causal, scale, layout, deterministic, modifiers)
        return run(q, k, v, True, *tensors)  # type: ignore[no-any-return]
    return attention(*arguments)  # type: ignore[no-any-return]
