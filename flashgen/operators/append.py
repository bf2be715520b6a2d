"""The operator that appends to a cache: schema, implementations, fake, FLOPs, and plans by signature.

`flashgen::append_to_cache` writes new keys and values to a cache, and gives how long sequences then are, and the rotated queries: an empty
tensor where nothing is rotated, because what an operator gives must not be what it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils.flop_counter import register_flop_formula

from ..launch import packed_arguments
from ..launch.append_arguments import AppendTensors, check_append, check_append_traced
from ..launch.append_plan import AppendPlan, rotated_shape
from ..launch.asked import require_no_gradient
from ..launch.cached_arguments import CachedKeys
from ..launch.cached_values import require_right_lengths
from ..launch.untraced import untraced
from ..selection import loaded
from . import plans
from .gradients import NoDerivativeError
from .registration import LIBRARY, cpu_is_allowed, register_for_all_others

NAME = "append_to_cache"
LIBRARY.define(
    f"{NAME}(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, Tensor cache_seqlens, Tensor? block_table, Tensor? q, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? k_descale, Tensor? v_descale, bool rotary_interleaved, bool by_query) "
    "-> (Tensor lengths, Tensor q_rotated)"
)
_NO_TRANSFORM = "flashgen's caches have no derivatives, and no rules for the transforms of torch.func"
_TENSORS = len(AppendTensors._fields)


def _signature(tensors: AppendTensors, flags: tuple[bool, bool]) -> tuple[Any, ...]:
    """What decides a plan."""
    of_tensors = [None if one is None else (one.shape, one.stride(), one.dtype, one.device) for one in tensors]
    return (*of_tensors, flags, loaded.kernels.generation)


def _sized(tensors: AppendTensors, flags: tuple[bool, bool]) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """What `SizedPlans` is told of a call: what decides plans but for sizes, and tensors that are there."""
    columns = None if tensors.rotary_cos is None else tensors.rotary_cos.shape[-1:]  # none of a wrong one
    is_there = tuple([tensor is not None for tensor in tensors])
    return (*flags, is_there, columns, loaded.kernels.generation), [tensor for tensor in tensors if tensor is not None]


def _new_plan(key: tuple[Any, ...], tensors: AppendTensors, flags: tuple[bool, bool]) -> AppendPlan:
    """The plan for a signature that this thread has not met."""
    plan, (options, there) = AppendPlan(tensors, *flags), _sized(tensors, flags)
    is_there = [tensor is not None for tensor in tensors]

    def planned(found: Sequence[Any], _: Any) -> tuple[Any, ...]:
        left = iter(found)
        every: list[Any] = [next(left) if has else None for has in is_there]
        return plan.numbers_of(AppendTensors(*every), *flags)

    plans.sized_plans("append", 2).learn(options, there, plan, planned)
    return plans.kept(_plans(), key, plan)


def append_plan_for(tensors: AppendTensors, rotary_interleaved: bool, by_query: bool) -> AppendPlan:
    """This thread's plan for the call's signature."""
    flags = rotary_interleaved, by_query
    found = plans.sized_plans("append", 2).find(*_sized(tensors, flags))
    if found is not None:
        return found  # type: ignore[no-any-return]
    key = _signature(tensors, flags)
    return _plans().get(key) or _new_plan(key, tensors, flags)


def _plans() -> dict[tuple[Any, ...], AppendPlan]:
    """This thread's."""
    found: dict[tuple[Any, ...], AppendPlan] = plans._LOCAL.__dict__.setdefault("append_plans", {})
    return found


def _told(*arguments: Any) -> tuple[AppendTensors, bool, bool]:
    """What the operator is told."""
    return AppendTensors(*arguments[:_TENSORS]), arguments[_TENSORS], arguments[_TENSORS + 1]


@untraced
def _cuda(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, *flags = _told(*arguments)
    for name, tensor in tensors.named.items():  # which no signature tells
        require_no_gradient(name, tensor)
    if packed_arguments.values_are_checked:
        check_append(tensors, *flags)
        _require_right_lengths(tensors)
    return append_plan_for(tensors, flags[0], flags[1]).run(*tensors)


@untraced
def _elsewhere(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, *flags = _told(*arguments)
    problem = check_append(tensors, *flags)
    cpu_is_allowed(tensors.k_cache, "k_cache")
    if packed_arguments.values_are_checked:
        _require_right_lengths(tensors)
    from . import cpu

    found = cpu.append_on_cpu(problem, tensors, *flags)
    torch.autograd.graph.increment_version((tensors.k_cache, tensors.v_cache))
    return found


def _require_right_lengths(tensors: AppendTensors) -> None:
    table, added = tensors.block_table, 0 if tensors.k is None else tensors.k.shape[1]
    # The operator is given a user's cache_batch_idx as such a table.
    name = "cache_batch_idx, or a block_table of one column," if table is not None and table.shape[1] == 1 else None
    require_right_lengths(tensors.k_cache, CachedKeys(tensors.cache_seqlens, table), added, name)


def _fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, *flags = _told(*arguments)
    check_append_traced(tensors, *flags)
    return torch.empty_like(tensors.cache_seqlens), tensors.k_cache.new_empty(rotated_shape(tensors), dtype=tensors.dtype)


def _refuse_mapped(*_: Any) -> NoReturn:
    raise NoDerivativeError(_NO_TRANSFORM)


LIBRARY.impl(NAME, _cuda, "CUDA")
register_for_all_others(NAME, _elsewhere)
torch.library.register_fake(f"flashgen::{NAME}", _fake, lib=LIBRARY)
torch.library.register_vmap(f"flashgen::{NAME}", _refuse_mapped, lib=LIBRARY)
append_to_cache = torch.ops.flashgen.append_to_cache.default


@register_flop_formula([torch.ops.flashgen.append_to_cache])
def _flops(k_cache: Sequence[int], v_cache: Sequence[int], k: Sequence[int] | None, *others: Any, **_: Any) -> int:
    """For `torch.utils.flop_counter`; shapes in place of tensors. Rotation has two products and an addition an element."""
    q, tables = others[3], others[4]
    rotated = [shape for shape in (k, q) if shape is not None and tables is not None]
    return sum(3 * shape[0] * shape[1] * shape[2] * shape[3] for shape in rotated)
