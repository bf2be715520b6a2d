"""Gradients of packed sequences: the operator `flashgen::attention_varlen`, which has autograd, and those of the backward pass.

`flashgen::attention_varlen_backward` gives those of q, k and v, `flashgen::attention_varlen_tensors_backward` of modifiers' tensors, too.
Second derivatives and the transforms of torch.func are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from ..launch import packed_arguments
from ..launch.asked import asked, have_gradients, names_with_gradients, require_gradients, signature_of
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
LIBRARY.define(f"attention_varlen_tensors_backward{_BACKWARD} -> Tensor[] gradients")
_OTHERS, _BACKWARD_OTHERS = 15, 19  # arguments of the operators before their modifiers' tensors
attention_varlen = torch.ops.flashgen.attention_varlen.default
attention_varlen_backward = torch.ops.flashgen.attention_varlen_backward.default
attention_varlen_tensors_backward = torch.ops.flashgen.attention_varlen_tensors_backward.default


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
def _backward_on_gpu(*arguments: Any, of_tensors: bool = False) -> Gradients:
    """of_tensors: whether gradients of modifiers' tensors are asked for, behind the others."""
    given = _usable(_decided(arguments))
    return _plan_for(of_tensors, *given).run(*given[:8], *given[12])


def _plan_for(of_tensors: bool, *given: Any) -> PackedGradientPlan:
    """This thread's."""
    known: dict[tuple[Any, ...], PackedGradientPlan] = plans._LOCAL.__dict__.setdefault("packed_gradient_plans", {})
    tokens: PackedTokens = given[7]
    every = (*given[:7], *tokens[:4], *given[12])
    is_there = tuple([tensor is not None for tensor in every])
    there = [tensor for tensor in every if tensor is not None]
    options, sized = (is_there, *given[8:12], of_tensors, loaded.kernels.generation), plans.sized_plans("packed_gradients")
    plan = sized.find(options, there, tokens[4:])
    if plan is None:
        key = (signature_of(there), *tokens[4:], options)
        plan = known.get(key)
    if plan is None:
        plan = PackedGradientPlan(*(*given, of_tensors))

        def planned(found: Sequence[Any], lengths: Any) -> tuple[Any, ...]:
            left = iter(found)
            all_of_them: list[Any] = [next(left) if has else None for has in is_there]
            of_tokens = PackedTokens(*all_of_them[7:11], *lengths)
            return plan.numbers_of(*all_of_them[:7], of_tokens, *given[8:12], all_of_them[11:], of_tensors)

        sized.learn(options, there, plan, planned, tokens[4:])
        plans.kept(known, key, plan)
    return plan  # type: ignore[no-any-return]


@untraced
def _backward_elsewhere(*arguments: Any, of_tensors: bool = False) -> Gradients:
    given = _decided(arguments)
    check_packed_gradient_call(*given)
    cpu_is_allowed(given[0])
    from . import cpu

    return cpu.packed_gradients_on_cpu(*(*_usable(given), of_tensors))


def _backward_fake(*arguments: Any, of_tensors: bool = False) -> Gradients:
    given = _decided(arguments)
    check_packed_gradient_call(*given)
    having = (tensor for tensor, has in zip(given[12], have_gradients(given[11].names), strict=True) if has and of_tensors)
    return tuple(tensor.new_empty(tensor.shape) for tensor in (*given[:3], *having))


def _with_tensors(backward: Callable[..., Gradients]) -> Callable[..., list[torch.Tensor]]:
    """The same as the other operator gives them."""
    return untraced(lambda *arguments: list(backward(*arguments, of_tensors=True)))


register_packed("attention_varlen", _forward, _forward, _forward_fake)
_BACKWARD_IMPLEMENTATIONS = (_backward_on_gpu, _backward_elsewhere, _backward_fake)
register_packed("attention_varlen_backward", *_BACKWARD_IMPLEMENTATIONS)
register_packed("attention_varlen_tensors_backward", *map(_with_tensors, _BACKWARD_IMPLEMENTATIONS))


@register_flop_formula(torch.ops.flashgen.attention_varlen)
def _flops(*arguments: Any, **_: Any) -> int:
    return flops_of_packed("forward", *_without_deterministic(arguments))


@register_flop_formula([torch.ops.flashgen.attention_varlen_backward, torch.ops.flashgen.attention_varlen_tensors_backward])
def _backward_flops(*arguments: Any, **_: Any) -> int:
    return flops_of_packed("backward", *_without_deterministic((*arguments[:3], *arguments[7:])))


def _gradients(alone: bool, needed: Sequence[bool], given: Sequence[Any], told: Sequence[Any], others: Sequence[torch.Tensor]) -> list[Any]:
    """Those of q, k and v, and of `others`, the tensors of modifiers, where they are `needed`; None for the rest.

    alone: whether to go past the dispatcher; given: what the operators take before they are `told` of modifiers: names, sizes, numbers
    """
    (names, sizes, numbers), of_tensors = told, any(needed[3:])
    if of_tensors:
        names = names_with_gradients(names, tuple(needed[3:]))
    arguments = (*given, names, sizes, numbers, list(others) or None)
    if alone:
        found = _backward_on_gpu(*arguments, of_tensors=of_tensors)
    else:
        found = (attention_varlen_tensors_backward if of_tensors else attention_varlen_backward)(*arguments)
    having = have_gradients(asked(names, sizes, numbers, others)[0].names) if of_tensors else (False,) * len(others)
    left = iter(found)
    return [one if need else None for one, need in zip((next(left) if has else None for has in (True,) * 3 + having), needed, strict=True)]


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
        needed = ctx.needs_input_grad
        if d_out is None and d_lse is None:
            return (None,) * len(needed)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        given = (q, k, v, out, lse, d_out, d_lse, *saved[:4], *ctx.options[:-3])
        found = _gradients(False, (*needed[:3], *needed[_OTHERS:]), given, ctx.options[-3:], saved[4:])
        return (*found[:3], *(None,) * (_OTHERS - 3), *found[3:])


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
        require_gradients(asked(names, sizes, numbers, others)[0].names, others)
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
        needed = ctx.needs_input_grad[4:]
        if d_out is None and d_lse is None:
            return (None,) * (4 + len(needed))
        # Gradients are enabled where a second derivative may be asked for; a negated view is one that the dispatcher negates first.
        plain = all(g is None or (type(g) is torch.Tensor and not g.is_neg()) for g in (d_out, d_lse))
        alone = plain and not torch.is_grad_enabled() and plans.nobody_listens()
        d_out = torch.zeros_like(out) if d_out is None else d_out
        given = (*tensors[:3], out, lse, d_out, d_lse, *options.tokens(tensors), options.causal, options.scale, deterministic)
        found = _gradients(alone, (*needed[:3], *needed[OF_MODIFIERS:]), given, told, tensors[OF_MODIFIERS:])
        return (None,) * 4 + (*found[:3], *(None,) * (OF_MODIFIERS - 3), *found[3:])


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
    require_gradients(options.modifiers.names, others)
    run = packed_plan_for(tensors, options).run
    return _PastDispatcher.apply(run, options, given[11], given[_OTHERS - 3 : _OTHERS], *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _BelowAutograd(torch.autograd.Function):
    """Gradients that may be asked for, but not differentiated."""

    @staticmethod
    @untraced
    def forward(ctx: Any, operator: Any, *arguments: Any) -> Gradients:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(operator(*listed(arguments, _BACKWARD_OTHERS)))

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NoDerivativeError(NO_SECOND)


@untraced
def _second_autograd(operator: Any, *arguments: Any) -> Any:
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments[:7])):
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)
    return _BelowAutograd.apply(operator, *flat(arguments, _BACKWARD_OTHERS))  # type: ignore[no-untyped-call]


LIBRARY.impl("attention_varlen", _autograd, "Autograd")
LIBRARY.impl("attention_varlen_backward", untraced(lambda *given: _second_autograd(attention_varlen_backward, *given)), "Autograd")
LIBRARY.impl(
    "attention_varlen_tensors_backward",
    untraced(lambda *given: list(_second_autograd(attention_varlen_tensors_backward, *given))),
    "Autograd",
)
