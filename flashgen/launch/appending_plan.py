"""A call on a KV cache on a GPU that appends to it, or rotates, and then computes attention: `AppendingPlan` has both programs.

One run writes both launches: what the first gives the second lies in memory that this call alone has, of which nobody makes a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import gpu
from .append_arguments import CHUNK, AppendTensors, require_append_memory
from .append_plan import AppendPlan, tables_of
from .arguments import ALIGNMENT, E4M3, require_memory
from .bound import BoundCall
from .cached_plan import CachedPlan, CachedRun, require_storages
from .gpu import Shapes
from .sized_plan import SizedPlan
from .untraced import untraced

_ALIGNED = 256  # bytes, of rotated queries behind lengths
_DENSE = (1,)  # strides
_address = torch.Tensor.data_ptr  # each call asks


class AppendedTensors(NamedTuple):
    """How many tensors a call has, in this order: q, the cache and its lengths, a table, padding, of modifiers, and what is appended.

    k_descale, v_descale: whether there are such, behind padding
    table, by_entry, padding: whether there is one, whether it is `cache_batch_idx`, and whether keys are padded
    appends, rotates: whether there are k and v, and rotary tables
    """

    table: bool
    by_entry: bool
    padding: bool
    modifiers: int
    appends: bool
    rotates: bool
    k_descale: bool = False
    v_descale: bool = False

    @property
    def end(self) -> int:
        """Of those of attention."""
        return self.first_descale + self.k_descale + self.v_descale + self.modifiers

    @property
    def first_descale(self) -> int:
        """Which of all tensors is the first of descales, if there are some."""
        return 4 + self.table + self.padding

    def of_append(self, tensors: Any) -> AppendTensors:
        """Those of what appends."""
        end, of_rotary = self.end, self.end + 2 * self.appends
        table = None if not self.table else tensors[4][:, None] if self.by_entry else tensors[4]
        k, v = (tensors[end], tensors[end + 1]) if self.appends else (None, None)
        rotary_cos, rotary_sin = (tensors[of_rotary], tensors[of_rotary + 1]) if self.rotates else (None, None)
        first = self.first_descale
        k_descale, v_descale = tensors[first] if self.k_descale else None, tensors[first + self.k_descale] if self.v_descale else None
        of_rotation = tensors[0], rotary_cos, rotary_sin
        return AppendTensors(tensors[1], tensors[2], k, v, tensors[3], table, *of_rotation, k_descale, v_descale)


class AppendingPlan(SizedPlan):
    """See SizedPlan. run: as that of `CachedPlan`, of all tensors of `AppendedTensors`.

    bound: to both kernels; None where one of them has nothing to do
    """

    __slots__ = ("_plans",)
    run: CachedRun

    def __init__(self, append: AppendPlan, attention: CachedPlan, there: AppendedTensors, tensors: Any) -> None:
        """append, attention: the plans of both, of which the second one is of queries as the first one gives them."""
        self._plans = append, attention
        q, v_cache = tensors[0], tensors[2]
        if append.bound is None or attention.bound is None:
            super().__init__(_one_by_one(append.run, attention.run, there), None, None)
        else:
            bound, tables = (append.bound, attention.bound), tables_of(there.of_append(tensors))
            run = _runner(q.device.index, q.dtype, tables, there, v_cache.dtype is E4M3, bound)
            super().__init__(run, _numbers(append.numbers, attention.numbers), bound)

    def numbers_of(self, attention: tuple[Any, ...], append: tuple[Any, ...]) -> tuple[Any, ...]:
        """`numbers` of another call: of the arguments of both plans, with `SizedTensor`s."""
        of_append, of_attention = self._plans
        return _numbers(of_append.numbers_of(*append), of_attention.numbers_of(*attention))


def _numbers(append: tuple[Shapes, Any], attention: tuple[Shapes, Any]) -> tuple[Any, ...]:
    """Of both plans: from where in the memory between them queries are, behind lengths, and its size in bytes."""
    (rotated, _, lengths, _), of_append = append
    at_queries = -(-4 * lengths[0] // _ALIGNED) * _ALIGNED
    return attention[0], at_queries, (at_queries + 2 * math.prod(rotated),), of_append, attention[1]


def _one_by_one(append: Callable[..., Any], attention: CachedRun, there: AppendedTensors) -> CachedRun:
    """Where one of them has nothing to do."""

    def run(_: None, with_lse: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        lengths, rotated = append(*there.of_append(tensors))
        q = rotated if there.rotates else tensors[0]
        return attention(with_lse, q, tensors[1], tensors[2], lengths, *tensors[4 : there.end])

    return run


def _runner(
    index: int,
    dtype: torch.dtype,
    tables: tuple[torch.dtype, int] | None,
    there: AppendedTensors,
    has_descales: bool,
    bound: tuple[BoundCall, BoundCall],
) -> CachedRun:
    """`AppendingPlan.run` where both have something to do, which takes numbers first.

    tables: see `tables_of`; has_descales: whether kernels take some; bound: what appends, and attention
    """
    append, attention, end = bound[0].enqueue, bound[1].enqueue, there.end
    of_rotary = end + 2 * there.appends
    has_table, has_padding, appends, rotates, of_modifiers = there.table, there.padding, there.appends, there.rotates, end - there.modifiers
    descale, has_k_descale, has_v_descale = there.first_descale, there.k_descale, there.v_descale
    in_fp32, in_chunks = tables is not None and tables[0] == torch.float32, tables is not None and tables[1] % CHUNK == 0
    empty_strided, current_device, current_stream = gpu.empty_strided, gpu.current_device, gpu.current_stream

    def run(numbers: tuple[Any, ...], with_lse: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if current_device() != index:
            with torch.cuda.device(index):
                return _runner(index, dtype, tables, there, has_descales, bound)(numbers, with_lse, *tensors)
        at = [*map(_address, tensors)]
        at_q, at_k_cache, at_v_cache, at_seqlens = at[:4]
        at_k, at_v = (at[end], at[end + 1]) if appends else (0, 0)
        at_cos, at_sin = (at[of_rotary], at[of_rotary + 1]) if rotates else (0, 0)
        together = at_q | at_k_cache | at_v_cache | at_k | at_v
        if in_chunks:
            together |= at_cos | at_sin
        if together % ALIGNMENT or 0 in at:
            require_memory(tensors[0], k_cache=tensors[1], v_cache=tensors[2])
            require_append_memory(there.of_append(tensors))
            require_storages(tensors[3:end])
        (out_shape, out_strides, lse_shape, lse_strides), at_queries, between, of_append, of_attention = numbers
        out = empty_strided(out_shape, out_strides, dtype)
        lse = empty_strided(lse_shape, lse_strides, torch.float32) if with_lse else None
        memory = empty_strided(between, _DENSE, torch.uint8)
        at_lengths = memory.data_ptr()
        at_rotated = at_lengths + at_queries
        at_table = at[4] if has_table else 0
        at_padding = at[4 + has_table] if has_padding else 0
        at_tables = (0, 0, at_cos, at_sin) if in_fp32 else (at_cos, at_sin, 0, 0)
        stream, asked = current_stream(index), at_q if rotates else 0
        at_descales: tuple[int, ...] = ()
        if has_descales:
            at_descales = (at[descale] if has_k_descale else 0, at[descale + has_k_descale] if has_v_descale else 0)
        at_made = at_rotated, at_lengths
        append(of_append, stream, at_k_cache, at_v_cache, at_k, at_v, at_seqlens, at_table, asked, *at_tables, *at_made, *at_descales)
        torch.autograd.graph.increment_version(tensors[1:3])  # so that autograd tells whoever saved one of them for a gradient
        at_q, at_lse = at_rotated if rotates else at_q, 0 if lse is None else lse.data_ptr()
        attention(
            of_attention,
            stream,
            at_q,
            at_k_cache,
            at_v_cache,
            out.data_ptr(),
            at_lse,
            at_lengths,
            at_table,
            at_padding,
            *at_descales,
            *at[of_modifiers:end],
        )
        return out, lse

    return run


_of_nothing = AppendedTensors(False, False, False, 0, False, False)
untraced(_one_by_one(lambda *_: None, lambda *_: None, _of_nothing))  # type: ignore[arg-type]  # marks the code, as the next
_nothing: Any = SimpleNamespace(enqueue=None)
untraced(_runner(0, torch.bfloat16, None, _of_nothing, False, (_nothing, _nothing)))
