"""Gradients: the operator `flashgen::attention_backward`, and what tells autograd and torch.func to use it.

Calls come here in three ways. `attention` is an operator with an autograd kernel, for PyTorch's tracers. What nobody listens to goes past
the dispatcher, forward and backward. Transforms of torch.func take a Function with `setup_context`, and only from outside of the
dispatcher. Derivatives of gradients, and forward-mode ones, are refused.

Whether gradients are deterministic where nobody says so is asked of PyTorch where they are computed, as its own operators do: in the
backward pass, by the operator itself, so that compiled and exported programs follow the setting of the process that runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.modifier import given_modifiers

from ..launch.gpu import Plan, untraced
from ..launch.gradients import Gradients, check_gradient_call, usable
from . import plans
from .batching import batched
from .registration import LIBRARY, attention_forward, cpu_is_allowed, flops_of, register_for_all_others, without_deterministic

_NO_SECOND = "flashgen.attention has no second derivative: take its gradients without create_graph=True, or use plain PyTorch there"
_NO_TANGENTS = "flashgen.attention has no forward-mode derivative: call it with the primals of its inputs"
_NOT_COMPILED = (
    "flashgen.attention has no gradients for torch.func within torch.compile: compile what is differentiated, not the differentiation"
)
_NOT_THE_OPERATOR = "torch.ops.flashgen.attention has no gradients for torch.func: call flashgen.attention"


class NoDerivativeError(FlashgenError, NotImplementedError):
    """A derivative is asked for. As a NotImplementedError it makes torch.compile leave the call to Python, which says the same."""


# torch.compile knows what this one gives, and takes `peek_interpreter_stack` for an object even where it gives None.
is_transformed = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def is_differentiated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether derivatives of a call may be asked for."""
    level = getattr(forward_ad, "_current_level", None)  # a private name: without it every call is looked at
    if level is None or level >= 0:
        if level is not None and torch.compiler.is_compiling():
            raise NoDerivativeError(_NO_TANGENTS)  # tangents cannot be seen here, and the compiled call would drop them
        return True
    return is_transformed() or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))


# ---- the operator -------------------------------------------------------------------------------------------------------

LIBRARY.define(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, "
    'bool causal, float? scale, str layout, bool? deterministic=None, str modifiers="", SymInt[] sizes=[]) '
    "-> (Tensor d_q, Tensor d_k, Tensor d_v)"
)
attention_backward = torch.ops.flashgen.attention_backward.default


@untraced
def _backward_cuda(*arguments: Any) -> Gradients:
    tensors = _usable(*arguments[:7])
    return plans.gradient_plan_for(*tensors, *_decided(*arguments[7:]))(*tensors)


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
    return causal, scale, layout, decided, given_modifiers(*modified)


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


LIBRARY.impl("attention_backward", _backward_cuda, "CUDA")
register_for_all_others("attention_backward", _backward_elsewhere)
torch.library.register_fake("flashgen::attention_backward", _backward_fake, lib=LIBRARY)


class _NoSecondDerivative(torch.autograd.Function):
    """Gradients that may be asked for, but not differentiated."""

    @staticmethod
    @untraced
    def forward(*arguments: Any) -> Gradients:
        return attention_backward(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    @untraced
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NoDerivativeError(_NO_SECOND)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NoDerivativeError(_NO_SECOND)

    @staticmethod
    @untraced
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return batched(_NoSecondDerivative.apply, 7)(info, in_dims, *arguments)


@untraced
def _second_autograd(*arguments: Any) -> Gradients:
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments[:7])):
        with torch._C._AutoDispatchBelowAutograd():
            return attention_backward(*arguments)  # type: ignore[no-any-return]
    return _BelowAutograd.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


class _BelowAutograd(torch.autograd.Function):
    """As `_NoSecondDerivative`, within the dispatcher."""

    @staticmethod
    @untraced
    def forward(ctx: Any, *arguments: Any) -> Gradients:
        with torch._C._AutoDispatchBelowAutograd():
            return attention_backward(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NoDerivativeError(_NO_SECOND)


LIBRARY.impl("attention_backward", _second_autograd, "Autograd")

# ---- autograd of attention ----------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: Sequence[Any], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]
    ctx.set_materialize_grads(False)


def _gradients(compute: Any, ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Those of the inputs that need one, None for the others."""
    if d_out is None and d_lse is None:
        return (None,) * (3 + len(ctx.options))
    q, k, v, out, lse = ctx.saved_tensors
    found = compute(q, k, v, out, lse, torch.zeros_like(out) if d_out is None else d_out, d_lse, *ctx.options)
    wanted = (gradient if needed else None for gradient, needed in zip(found, ctx.needs_input_grad, strict=False))
    return (*wanted, *(None for _ in ctx.options))


_forward = without_deterministic(attention_forward)


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
        return _gradients(attention_backward, ctx, *gradients)


class _Transformed(torch.autograd.Function):
    """From outside of the dispatcher, for the transforms of torch.func."""

    @staticmethod
    @untraced
    def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return _forward(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    @untraced
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        return _gradients(_NoSecondDerivative.apply, ctx, *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NoDerivativeError(_NO_TANGENTS)

    @staticmethod
    @untraced
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return batched(_Transformed.apply, 3)(info, in_dims, *arguments)


class _PastDispatcher(torch.autograd.Function):
    """Past the dispatcher, for tensors that `plans.only_the_kernel` says nobody else has an interest in."""

    @staticmethod
    @untraced
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, *options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The plan is this thread's for the tensors and the options.
        out, lse = plan.run(q, k, v, True)
        assert lse is not None
        _keep(ctx, (q, k, v, *options), (out, lse))
        return out, lse

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        # Gradients are enabled where a second derivative may be asked for; a negated view is one that the dispatcher negates first.
        plain = all(g is None or (type(g) is torch.Tensor and not g.is_neg()) for g in gradients)
        alone = plain and not torch.is_grad_enabled() and plans.nobody_listens()
        d_q, d_k, d_v, *options = _gradients(_backward_cuda if alone else attention_backward, ctx, *gradients)
        return d_q, d_k, d_v, None, *options  # the plan has none


@untraced
def _autograd(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = arguments[:3]
    if getattr(forward_ad, "_current_level", 0) >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NoDerivativeError(_NO_TANGENTS)  # PyTorch would drop them without a word
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return _forward(*arguments)  # type: ignore[no-any-return]
    if is_transformed():
        raise NoDerivativeError(_NOT_COMPILED if torch.compiler.is_compiling() else _NOT_THE_OPERATOR)
    return _Traced.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


LIBRARY.impl("attention", _autograd, "Autograd")
attention = torch.ops.flashgen.attention.default


@untraced
def differentiable_attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call of which derivatives may be asked for: `is_differentiated`."""
    if is_transformed():
        if torch.compiler.is_compiling():
            raise NoDerivativeError(_NOT_COMPILED)  # PyTorch 2.11 would compile gradients of 0 without a word
        return _Transformed.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    if not torch.compiler.is_compiling() and plans.only_the_kernel(*arguments[:3]):
        q, k, v, *options = arguments
        causal, scale, layout, deterministic, *modified = options
        modifiers = given_modifiers(*modified)
        plan = plans.plan_for(q, k, v, causal, scale, layout, modifiers)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: bool) -> Any:
            return _PastDispatcher.apply(q, k, v, plan, *options)  # type: ignore[no-untyped-call]

        plans.remember_differentiable(plan, run, (q, k, v), causal, scale, layout, deterministic, modifiers)
        return run(q, k, v, True)  # type: ignore[no-any-return]
    return attention(*arguments)  # type: ignore[no-any-return]
