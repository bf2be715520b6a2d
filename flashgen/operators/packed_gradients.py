"""Gradients of packed sequences: the operators `flashgen::attention_varlen_backward` and `flashgen::attention_varlen`, which has autograd.

Gradients of modifiers' tensors are refused by name, and so are second derivatives and the transforms of torch.func.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from ..launch import packed_arguments
from ..launch.asked import asked, require_no_gradient, signature_of, tensor_names
from ..launch.gradients import Gradients, usable
from ..launch.packed_arguments import PackedTokens
from ..launch.packed_gradients import PackedGradientPlan, check_packed_gradient_call
from ..launch.packed_plan import OF_MODIFIERS, PackedRun
from ..launch.untraced import untraced
from ..selection import loaded
from . import plans
from .autograd import is_transformed
from .gradients import NoDerivativeError, flat, listed
from .packed import (
    ARGUMENTS_OF_TOKENS,
    NO_TRANSFORM,
    PackedOptions,
    attention_varlen_forward,
    flops_of_packed,
    packed_plan_for,
    packed_told,
    register_packed,
)
from .registration import LIBRARY, cpu_is_allowed

NO_SECOND = "flashgen.attention_varlen has no second derivative: take its gradients without create_graph=True, or use plain PyTorch there"
_OPTIONS = ", bool causal, float? scale, bool? deterministic=None"
_MODIFIERS = ', str modifiers="", SymInt[] sizes=[], float[] numbers=[], Tensor[]? tensors=None)'
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {ARGUMENTS_OF_TOKENS}{_OPTIONS}{_MODIFIERS}"
_BACKWARD = (
    f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, {ARGUMENTS_OF_TOKENS}{_OPTIONS}{_MODIFIERS}"
)
LIBRARY.define(f"attention_varlen{_FORWARD} -> (Tensor out, Tensor lse)")
LIBRARY.define(f"attention_varlen_backward{_BACKWARD} -> (Tensor d_q, Tensor d_k, Tensor d_v)")
_OTHERS, _BACKWARD_OTHERS = 15, 19  # arguments of the operators before their modifiers' tensors
attention_varlen = torch.ops.flashgen.attention_varlen.default
attention_varlen_backward = torch.ops.flashgen.attention_varlen_backward.default


def _without_deterministic(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return (*arguments[:11], *arguments[12:])


@untraced
def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_varlen_forward(*_without_deterministic(arguments))  # type: ignore[no-any-return]


def _forward_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_varlen_forward(*_without_deterministic(arguments))  # type: ignore[no-any-return]


def _decided(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """What `check_packed_gradient_call` takes, of what the operator is told: tensors that kernels can take, PyTorch's setting."""
    q, k, v, out, lse, d_out, d_lse, *others = arguments
    of_tokens, (causal, scale, *more) = PackedTokens(*others[:6]), others[6:]
    deterministic, *modified = more or (None,)
    decided = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    return q, k, v, out, lse, d_out, d_lse, of_tokens, causal, scale, decided, *asked(*modified)


def _usable(given: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, out, lse, d_out, d_lse, *others = given
    lse, d_lse = lse.contiguous(), None if d_lse is None else d_lse.contiguous()
    return q, k, v, usable("out", out), lse, usable("d_out", d_out), d_lse, *others


@untraced
def _backward_on_gpu(*arguments: Any) -> Gradients:
    given = _usable(_decided(arguments))
    return _plan_for(*given)(*given[:8], *given[12])


def _plan_for(*given: Any) -> PackedGradientPlan:
    """This thread's."""
    known: dict[tuple[Any, ...], PackedGradientPlan] = plans._LOCAL.__dict__.setdefault("packed_gradient_plans", {})
    tokens: PackedTokens = given[7]
    there = tuple(tensor is not None for tensor in (*given[:7], *tokens[:4]))
    tensors = [tensor for tensor in (*given[:7], *tokens[:4], *given[12]) if tensor is not None]
    key = (signature_of(tensors), there, *tokens[4:], *given[8:12], loaded.kernels.generation)
    return known.get(key) or plans.kept(known, key, PackedGradientPlan(*given))


@untraced
def _backward_elsewhere(*arguments: Any) -> Gradients:
    given = _decided(arguments)
    check_packed_gradient_call(*given)
    cpu_is_allowed(given[0])
    from . import cpu

    return cpu.packed_gradients_on_cpu(*_usable(given))


def _backward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Gradients:
    check_packed_gradient_call(*_decided((q, k, v, *rest)))
    return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))


register_packed("attention_varlen", _forward, _forward, _forward_fake)
register_packed("attention_varlen_backward", _backward_on_gpu, _backward_elsewhere, _backward_fake)


@register_flop_formula(torch.ops.flashgen.attention_varlen)
def _flops(*arguments: Any, **_: Any) -> int:
    return flops_of_packed("forward", *_without_deterministic(arguments))


@register_flop_formula(torch.ops.flashgen.attention_varlen_backward)
def _backward_flops(*arguments: Any, **_: Any) -> int:
    return flops_of_packed("backward", *_without_deterministic((*arguments[:3], *arguments[7:])))


class _Packed(torch.autograd.Function):
    """Forward and backward are operators."""

    @staticmethod
    @untraced
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, *others = arguments
        out, lse = _forward(*listed(arguments, _OTHERS))
        ctx.save_for_backward(q, k, v, out, lse, *others[:4], *others[_OTHERS - 3 :])
        ctx.options = others[4 : _OTHERS - 3]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @untraced
    def backward(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *saved = ctx.saved_tensors
        count = len(ctx.needs_input_grad) - 3
        if d_out is None and d_lse is None:
            return (None,) * (3 + count)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        options = (*saved[:4], *ctx.options)
        found = attention_varlen_backward(q, k, v, out, lse, d_out, d_lse, *options, list(saved[4:]) or None)
        wanted = (gradient if need else None for gradient, need in zip(found, ctx.needs_input_grad, strict=False))
        return (*wanted, *(None,) * count)


@untraced
def _autograd(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = flat(arguments, _OTHERS)
    qkv, others = given[:3], given[_OTHERS:]
    if getattr(forward_ad, "_current_level", 0) >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in (*qkv, *others)):
        raise NoDerivativeError(NO_TRANSFORM)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*qkv, *others))):
        return _forward(*arguments)
    if is_transformed():
        raise NoDerivativeError(NO_TRANSFORM)
    if others:
        names, sizes, numbers = given[_OTHERS - 3 : _OTHERS]
        _require_no_gradients(asked(names, sizes, numbers, others)[0].names, others)
    return _Packed.apply(*given)  # type: ignore[no-any-return, no-untyped-call]


class _PastDispatcher(torch.autograd.Function):
    """Past the dispatcher, for tensors that `plans.only_the_kernel` says nobody else has an interest in. told: names, sizes, numbers."""

    @staticmethod
    @untraced
    def forward(
        ctx: Any, run: PackedRun, options: PackedOptions, deterministic: bool | None, told: tuple[Any, ...], *tensors: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run(True, *tensors)
        assert lse is not None
        ctx.save_for_backward(*tensors, out, lse)
        ctx.options = options, deterministic, told
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @untraced
    def backward(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        options, deterministic, told = ctx.options
        count = len(tensors) - 3
        if d_out is None and d_lse is None:
            return (None,) * (7 + count)
        # Gradients are enabled where a second derivative may be asked for; a negated view is one that the dispatcher negates first.
        plain = all(g is None or (type(g) is torch.Tensor and not g.is_neg()) for g in (d_out, d_lse))
        alone = plain and not torch.is_grad_enabled() and plans.nobody_listens()
        d_out = torch.zeros_like(out) if d_out is None else d_out
        others = tensors[OF_MODIFIERS:] or None
        of_call = (*options.tokens(tensors), options.causal, options.scale, deterministic, *told, others)
        given = (*tensors[:3], out, lse, d_out, d_lse, *of_call)
        found = (_backward_on_gpu if alone else attention_varlen_backward)(*given)
        needed = ctx.needs_input_grad[4:7]
        return (None,) * 4 + tuple(one if need else None for one, need in zip(found, needed, strict=True)) + (None,) * count


@untraced
def differentiable_varlen(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call of which derivatives may be asked for; the arguments are those of the operator."""
    if torch.compiler.is_compiling() or packed_arguments.values_are_checked:
        return attention_varlen(*arguments)  # type: ignore[no-any-return]
    given = flat(arguments, _OTHERS)
    others = given[_OTHERS:]
    if not plans.only_the_kernel(*given[:3], *[tensor for tensor in (*given[3:7], *others) if tensor is not None]):
        return attention_varlen(*arguments)  # type: ignore[no-any-return]
    tensors, options = packed_told(*_without_deterministic(arguments))
    _require_no_gradients(options.modifiers.names, others)
    run = packed_plan_for(tensors, options).run
    return _PastDispatcher.apply(run, options, given[11], given[_OTHERS - 3 : _OTHERS], *tensors)  # type: ignore[no-any-return, no-untyped-call]


def _require_no_gradients(names: tuple[str, ...], tensors: Sequence[torch.Tensor]) -> None:
    for name, tensor in zip(tensor_names(names), tensors, strict=True):
        require_no_gradient(name, tensor)


class _BelowAutograd(torch.autograd.Function):
    """Gradients that may be asked for, but not differentiated."""

    @staticmethod
    @untraced
    def forward(ctx: Any, *arguments: Any) -> Gradients:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(attention_varlen_backward(*listed(arguments, _BACKWARD_OTHERS)))

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NoDerivativeError(NO_SECOND)


@untraced
def _second_autograd(*arguments: Any) -> Gradients:
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments[:7])):
        with torch._C._AutoDispatchBelowAutograd():
            return attention_varlen_backward(*arguments)  # type: ignore[no-any-return]
    return _BelowAutograd.apply(*flat(arguments, _BACKWARD_OTHERS))  # type: ignore[no-any-return, no-untyped-call]


LIBRARY.impl("attention_varlen", _autograd, "Autograd")
LIBRARY.impl("attention_varlen_backward", _second_autograd, "Autograd")
