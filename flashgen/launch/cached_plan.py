"""A call on a KV cache on a GPU: `CachedPlan` holds everything that its signature decides, with the kernel bound to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.codegen.attention import attention_call
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifier import NO_MODIFIERS, Given
from flashgen.codegen.operands import Call
from flashgen.codegen.operation import dense
from flashgen.codegen.problem import Problem

from ..selection.families import families_for
from . import gpu
from .arguments import ALIGNMENT, require_memory
from .asked import tensor_strides
from .bound import BoundCall
from .cached_arguments import CachedKeys, cached_workload, check_cached_call
from .descales import descale_strides
from .gpu import Shapes
from .sized_plan import SizedPlan
from .untraced import untraced

CachedRun = Callable[
    ..., tuple[torch.Tensor, torch.Tensor | None]
]  # whether to give lse; q, the cache, those of `CachedKeys`, of modifiers
_address = torch.Tensor.data_ptr  # each call asks
Parts = tuple[()] | tuple[int, int]
"""Where q, the cache and out have a batch of 1, with all sequences one behind the other: how many queries a sequence has, and keys an entry
of the cache. Else nothing."""


class CachedPlan(SizedPlan):
    """See SizedPlan.

    bound: to the kernel; None where there is nothing to compute
    run: given whether lse is wanted, and all tensors that are there, allocates out, and lse, both dense, and enqueues the kernel on the
    current stream
    """

    __slots__ = ()
    run: CachedRun

    def __init__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        where: CachedKeys,
        causal: bool,
        scale: float | None,
        batch_invariant: bool = False,
        modifiers: Given = NO_MODIFIERS,
        tensors: Sequence[torch.Tensor] = (),
        parts: Parts = (),
    ) -> None:
        """Checks the arguments and binds the kernel that the selection chooses."""
        shapes, call, problem = _planned(q, k_cache, v_cache, where, causal, scale, batch_invariant, modifiers, tensors, parts)
        on = gpu.gpu_of(q)
        optional = (where.table, where.cache_leftpad, *((where.k_descale, where.v_descale) if problem.dtype_kv is not None else ()))
        absent = tuple(at for at, tensor in enumerate(optional, 1) if tensor is None)
        families_for(problem, on.device.target)
        bound = None if call is None else gpu.bind_chosen(call, on)
        super().__init__(_runner(q.device.index, q.dtype, absent, bound), (shapes, bound and bound.numbers), bound)
        gpu.require_context(q.device.index)

    def numbers_of(self, *arguments: Any) -> tuple[Any, ...]:
        """`numbers` of another call: of the arguments of `CachedPlan`, with `SizedTensor`s."""
        shapes, call, _ = _planned(*arguments)
        return shapes, gpu.chosen_numbers(call, self.bound)


def _planned(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    where: CachedKeys,
    causal: bool,
    scale: float | None,
    batch_invariant: bool,
    modifiers: Given,
    tensors: Sequence[Any],
    parts: Parts = (),
) -> tuple[Shapes, Call | None, Problem]:
    """Of tensors, which are checked, or `SizedTensor`s: shapes, the call, None without queries, and its problem."""
    if parts:
        of_q, of_kv = parts
        q, k_cache, v_cache = _apart("q", q, of_q), _apart("k_cache", k_cache, of_kv), _apart("v_cache", v_cache, of_kv)
    problem = check_cached_call(q, k_cache, v_cache, where, causal, scale, batch_invariant, modifiers, tensors)
    out, lse = (*q.shape[:3], v_cache.shape[3]), (q.shape[0], q.shape[2], q.shape[1])
    given = (1, q.shape[0] * q.shape[1], *out[2:]) if parts else out
    shapes = given, dense(given), lse, dense(lse)
    if not (q.shape[0] and q.shape[1] and q.shape[2]):
        return shapes, None, problem
    strides = cached_strides(q, k_cache, v_cache, where) | (tensor_strides(problem, tensors) if tensors else {})
    call = attention_call(problem, cached_workload(q, k_cache, where, modifiers), strides, scale, modifiers.numbers)
    return shapes, call, problem


def _apart(name: str, tensor: Any, length: int) -> Any:
    """[entries, length, heads, head_dim] of [1, entries * length, heads, head_dim]."""
    if tensor.ndim != 4 or tensor.shape[0] != 1 or tensor.shape[1] % length:
        raise ArgumentError(f"{name} must have a batch of 1 with a multiple of {length} rows; got {tuple(tensor.shape)}")
    return tensor.view(tensor.shape[1] // length, length, tensor.shape[2], tensor.shape[3])


def cached_strides(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, where: CachedKeys) -> dict[str, tuple[int, ...]]:
    """Of operands of a call that has passed `check_cached_call`, along their axes: 0 where the size is 1. out is dense."""
    out = (*q.shape[:3], v_cache.shape[3])
    shapes = (("q", q.shape, q.stride()), ("k", k_cache.shape, k_cache.stride()), ("v", v_cache.shape, v_cache.stride()))
    found: dict[str, tuple[int, ...]] = {
        name: (
            strides[0] if sizes[0] > 1 else 0,
            strides[1] if sizes[1] > 1 else 0,
            strides[2] if sizes[2] > 1 else 0,
            1,
        )
        for name, sizes, strides in (*shapes, ("out", out, dense(out)))
    }
    if (table := where.table) is not None:
        found["block_table"] = (table.stride(0) if table.shape[0] > 1 else 0, 1 if where.table_pages > 1 else 0)
    return (
        found | descale_strides(where.k_descale, where.v_descale) if where.k_descale is not None or where.v_descale is not None else found
    )


def _runner(index: int, dtype: torch.dtype, absent: tuple[int, ...], bound: BoundCall | None) -> CachedRun:
    """`CachedPlan.run`, which takes numbers first.

    absent: places of operands behind lse that are not there; bound: None where there is nothing to compute
    """
    enqueue = None if bound is None else bound.enqueue
    empty_strided, current_device, current_stream = gpu.empty_strided, gpu.current_device, gpu.current_stream

    def run(
        numbers: tuple[Shapes, Any],
        with_lse: bool,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if current_device() != index:
            with torch.cuda.device(index):
                return _runner(index, dtype, absent, bound)(numbers, with_lse, q, k_cache, v_cache, *tensors)
        (out_shape, out_strides, lse_shape, lse_strides), of_bound = numbers
        out = empty_strided(out_shape, out_strides, dtype)
        lse = empty_strided(lse_shape, lse_strides, torch.float32) if with_lse else None
        if enqueue is not None:
            at_q, at_k, at_v, others = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), [*map(_address, tensors)]
            if (at_q | at_k | at_v) % ALIGNMENT or not (at_q and at_k and at_v):
                require_memory(q, k_cache=k_cache, v_cache=v_cache)
            if 0 in others:
                require_storages(tensors)
            for at in absent:
                others.insert(at, 0)
            at_lse = 0 if lse is None else lse.data_ptr()
            enqueue(of_bound, current_stream(index), at_q, at_k, at_v, out.data_ptr(), at_lse, *others)
        return out, lse

    return run


def require_storages(tensors: Sequence[torch.Tensor]) -> None:
    """Raises ArgumentError for one that has elements, but no memory."""
    if any(tensor.numel() and not tensor.data_ptr() for tensor in tensors):
        names = "cache_seqlens, block_table, cache_batch_idx, cache_leftpad and tensors of modifiers"
        raise ArgumentError(f"{names} must have storages that hold their elements; got one without")


untraced(_runner(0, torch.bfloat16, (), None))  # marks the code, which all that it returns share
