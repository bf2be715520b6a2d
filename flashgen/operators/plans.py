"""A thread's plans by signature, and the way past PyTorch's dispatcher for a call that nobody else has an interest in.

A plan is kept per thread, so a call takes no lock: it looks the signature up, allocates, writes the addresses and launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad, profiler

from flashgen.codegen.modifier import NO_MODIFIERS, Given

from ..launch.arguments import check_options
from ..launch.asked import OF_KEYS, signature_of, with_made_axes
from ..launch.gpu import Plan, Run
from ..launch.private_names import knows_tensors, tensor_guard
from ..launch.sized_plans import SizedPlans
from ..launch.untraced import untraced
from ..selection import loaded

_MAX_PLANS = 4096  # a thread's; beyond that the oldest half is dropped
_Plan = TypeVar("_Plan")


def _signature(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
    modifiers: Given = NO_MODIFIERS,
    tensors: tuple[torch.Tensor, ...] = (),
) -> tuple[Any, ...]:
    """What decides a plan."""
    return signature_of((q, k, v, *tensors)), causal, scale, modifiers, layout, loaded.kernels.generation


def _listeners() -> Callable[[], bool]:
    """What tells that nobody but the kernel has an interest in a call: no mode, transform, tracer, profiler or forward-mode gradient.

    PyTorch tells by private names, which may go. Without one of them the answer is always no: the dispatcher asks by itself.
    """
    try:
        dispatch_modes, function_modes = torch._C._len_torch_dispatch_stack, torch._C._is_torch_function_mode_enabled
        transforms, tracer = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state

        def nobody() -> bool:
            return (
                not dispatch_modes()
                and not function_modes()
                and transforms() is None
                and tracer() is None
                and forward_ad._current_level < 0
                and not profiler._is_profiler_enabled
            )

        nobody()
    except (AttributeError, TypeError):
        return lambda: False
    return nobody


def _modes() -> tuple[Callable[[], object], Callable[[], object]]:
    """Whether there are dispatch modes, and function modes: without PyTorch's private names, whether `_listeners` know of anybody."""
    try:
        return torch._C._len_torch_dispatch_stack, torch._C._is_torch_function_mode_enabled
    except AttributeError:
        return lambda: not nobody_listens(), lambda: False


nobody_listens = _listeners()
_dispatch_modes, _function_modes = _modes()
_PLAIN = {torch.Tensor, torch.nn.Parameter}


@untraced
def run_at_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
    return_lse: bool = False,
    deterministic: bool | None = None,
    modifiers: Given = NO_MODIFIERS,
    tensors: tuple[torch.Tensor, ...] = (),
) -> Run | None:
    """What runs a call past the dispatcher, if that would do nothing but run it: this thread's plan, or one that autograd will know of.

    So it is where nothing wants to see the call: no subclass, mode, transform, tracer or profiler. The way through the dispatcher costs a
    fifth of a call. A call like the one before is known again by one look at the tensors; with gradients, only such a call is.
    Modifiers may have OF_KEYS among their names. Raises ArgumentError as `check_types` and `Plan` do.
    """
    before = _LOCAL.before
    if (
        before is not None
        and before.count == len(tensors)
        and before.fits(q, k, v, *tensors)
        and before.causal is causal
        and (before.scale is scale or (type(scale) is float and before.scale == scale))
        and (before.layout is layout or (type(layout) is str and before.layout == layout))
        and (before.modifiers is modifiers or before.modifiers == modifiers)
        and before.generation == loaded.kernels.generation
        # What the dispatch keys of tensors do not tell, of what `_listeners` ask.
        and not _dispatch_modes()
        and not _function_modes()
        and forward_ad._current_level < 0
        and not profiler._is_profiler_enabled
        # Tensors fit whether gradients are enabled or not.
        and (not before.differentiable or (before.deterministic is deterministic and torch.is_grad_enabled()))
    ):
        return before.run
    looked_at, plans = (modifiers, tensors), _plans()
    try:
        plan: Plan | None = None
        if OF_KEYS not in modifiers.names and no_modes():
            options = causal, scale, layout, modifiers, loaded.kernels.generation
            plan = sized_plans("plans").find(options, (q, k, v, *tensors), alone=True)
        if plan is None:
            if not _without_gradients(q, k, v) or (tensors and not are_plain(tensors)):
                return None
            if OF_KEYS in modifiers.names:
                modifiers, tensors = with_made_axes(modifiers, tensors)
                options = causal, scale, layout, modifiers, loaded.kernels.generation
                plan = sized_plans("plans").find(options, (q, k, v, *tensors))
        if plan is None:
            key = _signature(q, k, v, causal, scale, layout, modifiers, tensors)
            plan = plans.get(key)
    except (AttributeError, TypeError, RuntimeError):  # an argument that `check_types` will speak of
        return None
    if plan is None or type(causal) is not bool:  # 1 is equal to True, and finds its plan: `check_options` refuses it
        if not (q.is_cuda and k.is_cuda and v.is_cuda) or torch.is_autocast_enabled("cuda"):  # which may cast them first
            return None
        check_options(causal, scale, layout, return_lse)
        return _new_plan(plans, key, q, k, v, causal, scale, layout, modifiers, tensors).run
    if knows_tensors:
        modifiers, tensors = looked_at
        needed = plan.met and (plan.before is None or plan.before.modifiers != modifiers)
        if needed and not (q.requires_grad or k.requires_grad or v.requires_grad):
            plan.before = _Before(plan.run, (q, k, v, *tensors), causal, scale, layout, None, modifiers)
        plan.met = True
        _LOCAL.before = plan.before
    return plan.run


def remember_differentiable(plan: Plan, run: Run, tensors: tuple[torch.Tensor, ...], *options: Any) -> None:
    """Lets `run_at_hand` find what runs a call with gradients, of tensors for which `only_the_kernel` holds. `options`: as it has them."""
    if knows_tensors:
        before: _Before | None = plan.before_differentiable
        if before is None or before.deterministic is not options[3]:
            before = plan.before_differentiable = _Before(run, tensors, *options)
        _LOCAL.before = before


def only_the_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor) -> bool:
    """Whether these are plain tensors, q, k and v on a GPU, and nobody but autograd has an interest in what a kernel makes of them."""
    return (
        {type(q), type(k), type(v), *map(type, tensors)} <= _PLAIN
        and q.is_cuda
        and k.is_cuda
        and v.is_cuda
        and nobody_listens()
        and not (q.is_neg() or k.is_neg() or v.is_neg() or any(tensor.is_neg() for tensor in tensors))  # the dispatcher negates them first
    )


def no_modes() -> bool:
    """What the dispatch keys of tensors do not tell, of what `nobody_listens` asks."""
    return not _dispatch_modes() and not _function_modes() and forward_ad._current_level < 0 and not profiler._is_profiler_enabled


def _without_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the dispatcher would do nothing with a call of these but hand it to the kernel."""
    return (
        type(q) is type(k) is type(v) is torch.Tensor
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and nobody_listens()
        and not (q.is_neg() or k.is_neg() or v.is_neg())  # the dispatcher negates them first
    )


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the dispatcher would do nothing with a call of these but hand it to the kernel."""
    return not any(type(t) is not torch.Tensor or t.is_neg() or (t.requires_grad and torch.is_grad_enabled()) for t in tensors)


class _Before:
    """What ran a call, and what tells that another one has its signature and wants no more.

    `fits`: whether tensors have the types, dispatch keys, dtypes, devices, sizes and strides of that call, and need gradients as it did.
    """

    __slots__ = ("causal", "count", "deterministic", "differentiable", "fits", "generation", "layout", "modifiers", "run", "scale")

    def __init__(
        self,
        run: Run,
        tensors: tuple[torch.Tensor, ...],
        causal: bool,
        scale: float | None,
        layout: str,
        deterministic: bool | None = None,
        modifiers: Given = NO_MODIFIERS,
    ) -> None:
        self.run, self.causal, self.scale, self.layout, self.modifiers = run, causal, scale, layout, modifiers
        self.generation, self.count = loaded.kernels.generation, len(tensors) - 3
        self.deterministic, self.differentiable = deterministic, any(tensor.requires_grad for tensor in tensors)
        self.fits = tensor_guard(tensors)


class _OfThread(threading.local):
    """What each thread has of its own. before: what ran its last call, if that can be known again; the others: of other operators."""

    before: _Before | None = None
    before_packed: Any = None


_LOCAL = _OfThread()


def plan_for(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
    modifiers: Given = NO_MODIFIERS,
    tensors: tuple[torch.Tensor, ...] = (),
) -> Plan:
    """This thread's plan for the call's signature: see `Plan`."""
    arguments, options = (q, k, v, causal, scale, layout, modifiers, tensors), (causal, scale, layout, modifiers, loaded.kernels.generation)
    plan: Plan | None = sized_plans("plans").find(options, (q, k, v, *tensors))
    if plan is None:
        plans, key = _plans(), _signature(*arguments)
        plan = plans.get(key) or _new_plan(plans, key, *arguments)
    return plan


def _new_plan(
    plans: dict[tuple[Any, ...], Plan],
    key: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
    modifiers: Given,
    tensors: tuple[torch.Tensor, ...],
) -> Plan:
    """The plan for a signature that this thread has not met."""
    plan = Plan(q, k, v, causal, scale, layout, modifiers, tensors)

    def planned(found: Sequence[Any], _: Any) -> tuple[Any, ...]:
        return plan.numbers_of(found[0], found[1], found[2], causal, scale, layout, modifiers, found[3:])

    sized_plans("plans").learn((causal, scale, layout, modifiers, loaded.kernels.generation), (q, k, v, *tensors), plan, planned)
    return kept(plans, key, plan)


def sized_plans(name: str, of_heads: int = 3) -> SizedPlans:
    """This thread's of a kind of plans."""
    every: dict[str, SizedPlans] = _LOCAL.__dict__.setdefault("sized", {})
    return every.get(name) or every.setdefault(name, SizedPlans(of_heads))


def _plans() -> dict[tuple[Any, ...], Plan]:
    """This thread's."""
    return _LOCAL.__dict__.setdefault("plans", {})  # type: ignore[no-any-return]


def kept(plans: dict[tuple[Any, ...], _Plan], key: tuple[Any, ...], plan: _Plan) -> _Plan:
    """The plan, which is among these from now on: beyond so many the oldest half of them is dropped."""
    if len(plans) >= _MAX_PLANS:
        for old in list(plans)[: _MAX_PLANS // 2]:
            del plans[old]
    plans[key] = plan
    return plan
