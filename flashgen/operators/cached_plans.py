"""A thread's plans of calls on KV caches, and the way past the dispatcher for a call that nobody else has an interest in: see plans.py.

A call that appends or rotates is two of them in one, by one look at all of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flashgen.codegen.modifier import NO_MODIFIERS, Given

from ..launch import packed_arguments
from ..launch.appending_plan import AppendedTensors, AppendingPlan
from ..launch.arguments import check_options
from ..launch.asked import signature_of
from ..launch.cached_arguments import CachedKeys
from ..launch.cached_plan import CachedPlan, CachedRun, Parts
from ..launch.private_names import knows_tensors, tensor_guard
from ..launch.untraced import untraced
from ..selection import loaded
from . import plans
from .append import append_plan_for

# Bits of `CachedOptions.there`.
TABLE, BATCH_IDX, LEFTPAD, APPENDED, ROTARY, K_DESCALE, V_DESCALE = 1, 2, 4, 8, 16, 32, 64
OPTIONAL = TABLE, BATCH_IDX, LEFTPAD, K_DESCALE, V_DESCALE  # of attention
_TABLES = TABLE | BATCH_IDX  # of which a call has one at most
_OF_ATTENTION = sum(OPTIONAL)
_MOST_BEFORE = 64  # calls of a thread that are known at once


class CachedOptions(NamedTuple):
    """What decides a plan beside tensors: q, the cache and its lengths, those that are `there`, of modifiers, and what is appended.

    there: bits of the optional tensors, in their order; k and v have one bit, and so have the rotary tables
    rotary_interleaved, by_query: as the operator `append_to_cache` has them, False without rotary tables
    parts: of calls that append nothing: see `Parts`
    """

    there: int = 0
    causal: bool = False
    scale: float | None = None
    modifiers: Given = NO_MODIFIERS
    batch_invariant: bool = False
    rotary_interleaved: bool = False
    by_query: bool = False
    parts: Parts = ()

    @property
    def first_of_modifiers(self) -> int:
        """Which of all tensors is the first of modifiers."""
        return 4 + (self.there & _OF_ATTENTION).bit_count()

    def where(self, tensors: Sequence[torch.Tensor]) -> CachedKeys:
        """Of all tensors of a call."""
        rest = iter(tensors[4:])
        return CachedKeys(tensors[3], *[next(rest) if self.there & bit else None for bit in OPTIONAL])

    def appended(self, count: int) -> AppendedTensors:
        """Which of so many tensors is which."""
        has = [bool(self.there & bit) for bit in (TABLE | BATCH_IDX, BATCH_IDX, LEFTPAD, APPENDED, ROTARY)]
        of_modifiers = count - self.first_of_modifiers - 2 * (has[3] + has[4])
        descales = bool(self.there & K_DESCALE), bool(self.there & V_DESCALE)
        return AppendedTensors(has[0], has[1], has[2], of_modifiers, has[3], has[4], *descales)


class _Before:
    """What ran a call, and what tells that another one of the same options has its signature: see `plans`."""

    __slots__ = ("fits", "generation", "run")

    def __init__(self, run: CachedRun, tensors: Sequence[torch.Tensor]) -> None:
        self.run, self.fits, self.generation = run, tensor_guard(tuple(tensors)), loaded.kernels.generation


_Plan = CachedPlan | AppendingPlan


@untraced
def cached_run_at_hand(tensors: Sequence[torch.Tensor], options: tuple[Any, ...]) -> CachedRun | None:
    """What runs a call past the dispatcher, if that would do nothing but run it: see `plans.run_at_hand`.

    tensors: all that are there; options: the fields of `CachedOptions`. Calls that differ in these are known side by side, as a model's
    layers may. Where lengths are checked there is none. Raises ArgumentError as `check_options`, `CachedPlan` and `AppendPlan` do.
    """
    try:
        known: dict[tuple[Any, ...], _Before] = plans._LOCAL.__dict__.setdefault("before_cached", {})
        before = known.get(options)
        if (
            before is not None
            and before.fits(*tensors)
            and before.generation == loaded.kernels.generation
            and plans.no_modes()
            and type(options[1]) is bool
            and not packed_arguments.values_are_checked
        ):
            return before.run
        if packed_arguments.values_are_checked or options[0] & _TABLES == _TABLES:  # `check_cached_call` will speak of both
            return None
        plan: _Plan | None = None
        if plans.no_modes() and type(options[1]) is bool:
            plan = plans.sized_plans("cached").find(_sized(tensors, options), tensors, alone=True)
        if plan is None:
            if not plans.are_plain(tensors) or not plans.nobody_listens():
                return None
            key = (signature_of(tensors), options, loaded.kernels.generation)
            plan = _plans().get(key)
    except (AttributeError, TypeError, RuntimeError):  # an argument that `check_cached_types` will speak of
        return None
    if plan is None:
        if not all(tensor.is_cuda for tensor in tensors[:3]) or torch.is_autocast_enabled("cuda"):  # which may cast them first
            return None
        check_options(options[1], options[2], "bshd", False)
        return _new_plan(key, tensors, CachedOptions(*options)).run  # whether it comes again, who knows: a guard takes as long as a call
    if knows_tensors and type(options[1]) is bool:
        may_be_known = (
            plan.before is None and plan.met and len({*map(id, tensors)}) == len(tensors)
        )  # PyTorch's check knows no tensor that is there twice
        if may_be_known and not any(tensor.requires_grad for tensor in tensors):
            plan.before = _Before(plan.run, tensors)
        plan.met = True
        if plan.before is not None:
            if len(known) >= _MOST_BEFORE:
                known.clear()
            known[options] = plan.before
    return plan.run


def _sized(tensors: Sequence[torch.Tensor], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """What decides plans but for sizes, and is not told by which tensors are there."""
    return options, tensors[-1].shape[-1:] if options[0] & ROTARY else None, loaded.kernels.generation


def _new_plan(key: tuple[Any, ...], tensors: Sequence[torch.Tensor], options: CachedOptions) -> _Plan:
    """The plan for a signature that this thread has not met."""
    plan: _Plan
    planned: Callable[[Sequence[Any], Any], tuple[Any, ...]]
    if options.there & ~_OF_ATTENTION:
        plan = appending = _new_appending(tensors, options)

        def planned(found: Sequence[Any], _: Any) -> tuple[Any, ...]:
            there = options.appended(len(found))
            own = cached_checks(_of_attention(found, there, lambda q: q.new_empty(q.shape)), _without_append(options))
            return appending.numbers_of(own, (there.of_append(found), options.rotary_interleaved, options.by_query))
    else:
        plan = cached = CachedPlan(*_arguments(tensors, options))

        def planned(found: Sequence[Any], _: Any) -> tuple[Any, ...]:
            return cached.numbers_of(*_arguments(found, options))

    plans.sized_plans("cached").learn(_sized(tensors, tuple(options)), tensors, plan, planned)
    return plans.kept(_plans(), key, plan)


def _new_appending(tensors: Sequence[torch.Tensor], options: CachedOptions) -> AppendingPlan:
    """The same of a call that appends or rotates: attention is planned first, so that no cache changes where it cannot be computed."""
    there = options.appended(len(tensors))
    attention = cached_plan_for(_of_attention(tensors, there, _dense_like), _without_append(options))
    return AppendingPlan(append_plan_for(there.of_append(tensors), options.rotary_interleaved, options.by_query), attention, there, tensors)


def _of_attention(tensors: Sequence[Any], there: AppendedTensors, dense_like: Callable[[Any], Any]) -> list[Any]:
    """The tensors that attention has behind what appends: rotated queries are dense."""
    own = list(tensors[: there.end])
    if there.rotates:
        own[0] = dense_like(own[0])
    return own


def _without_append(options: CachedOptions) -> CachedOptions:
    return CachedOptions(options.there & _OF_ATTENTION, *options[1:5])


def _dense_like(q: torch.Tensor) -> torch.Tensor:
    return q if q.is_contiguous() else torch.empty_like(q, memory_format=torch.contiguous_format)


def _plans() -> dict[tuple[Any, ...], _Plan]:
    """This thread's, of attention alone and with what is appended."""
    found: dict[tuple[Any, ...], _Plan] = plans._LOCAL.__dict__.setdefault("cached_plans", {})
    return found


def cached_plan_for(tensors: Sequence[torch.Tensor], options: CachedOptions) -> CachedPlan:
    """This thread's plan for the signature of a call of attention alone."""
    found = plans.sized_plans("cached").find(_sized(tensors, tuple(options)), tensors)
    if found is not None:
        return found  # type: ignore[no-any-return]
    key = (signature_of(tensors), tuple(options), loaded.kernels.generation)
    return _plans().get(key) or _new_plan(key, tensors, options)  # type: ignore[return-value]


def _arguments(tensors: Sequence[torch.Tensor], options: CachedOptions) -> tuple[Any, ...]:
    """The arguments of `CachedPlan`."""
    return (*cached_checks(tensors, options), options.parts)


def cached_checks(tensors: Sequence[torch.Tensor], options: CachedOptions) -> tuple[Any, ...]:
    """The arguments of `check_cached_call`."""
    q, k_cache, v_cache, *_ = tensors
    others = tensors[options.first_of_modifiers :]
    return q, k_cache, v_cache, options.where(tensors), options.causal, options.scale, options.batch_invariant, options.modifiers, others
