"""A call on a GPU that appends to a cache: `AppendPlan` holds everything that its signature decides, with the kernel bound to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.codegen.operands import Call
from flashgen.codegen.operation import dense
from flashgen.codegen.problem import Problem

from ..selection.families import families_for
from . import gpu
from .append_arguments import CHUNK, AppendTensors, append_call, check_append, require_append_memory
from .arguments import ALIGNMENT, E4M3
from .bound import BoundCall
from .sized_plan import SizedPlan
from .untraced import untraced

AppendRun = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # those of `AppendTensors`, one by one
_NOTHING = (0,)  # the shape of queries that nobody rotates


class AppendPlan(SizedPlan):
    """See SizedPlan.

    run: given the tensors of `AppendTensors`, allocates lengths and rotated queries, both dense, and enqueues the kernel on the current
    stream
    """

    __slots__ = ()
    run: AppendRun

    def __init__(self, tensors: AppendTensors, rotary_interleaved: bool, by_query: bool) -> None:
        """Checks the arguments and binds the kernel that the selection chooses."""
        shapes, call, problem = _planned(tensors, rotary_interleaved, by_query)
        on, cache = gpu.gpu_of(tensors.k_cache, "k_cache"), tensors.k_cache
        families_for(problem, on.device.target)
        bound = None if call is None else gpu.bind_chosen(call, on)
        run = _runner(cache.device.index, tensors.dtype, tables_of(tensors), cache.dtype is E4M3, bound)
        super().__init__(run, (shapes, bound and bound.numbers), bound)
        gpu.require_context(cache.device.index)

    def numbers_of(self, *arguments: Any) -> tuple[Any, ...]:
        """`numbers` of another call: of the arguments of `AppendPlan`, with `SizedTensor`s, but for tables."""
        shapes, call, _ = _planned(*arguments)
        return shapes, gpu.chosen_numbers(call, self.bound)


def _planned(tensors: AppendTensors, rotary_interleaved: bool, by_query: bool) -> tuple[gpu.Shapes, Call | None, Problem]:
    """Of tensors, which are checked, or `SizedTensor`s: sizes and strides of queries, and of lengths; the call; its problem.

    No call where there are no sequences.
    """
    problem = check_append(tensors, rotary_interleaved, by_query)
    call = append_call(problem, tensors, rotary_interleaved, by_query)
    rotated, lengths = rotated_shape(tensors), (call.workload.batch,)
    return (rotated, dense(rotated), lengths, dense(lengths)), call if call.workload.batch else None, problem


def tables_of(tensors: AppendTensors) -> tuple[torch.dtype, int] | None:
    """Element type and columns of the tables of a rotation, None without."""
    return None if tensors.rotary_cos is None else (tensors.rotary_cos.dtype, tensors.rotary_cos.shape[1])


def rotated_shape(tensors: AppendTensors) -> tuple[int, ...]:
    """Of the queries that a call gives."""
    return _NOTHING if tensors.rotated is None else tuple(tensors.rotated.shape)


def _runner(
    index: int,
    dtype: torch.dtype,
    tables: tuple[torch.dtype, int] | None,
    has_descales: bool,
    bound: BoundCall | None,
) -> AppendRun:
    """`AppendPlan.run`, which takes numbers first.

    tables: see `tables_of`; has_descales: whether the kernel takes some; bound: None where there are no sequences
    """
    enqueue = None if bound is None else bound.enqueue
    rotates, in_fp32 = tables is not None, tables is not None and tables[0] == torch.float32
    in_chunks = tables is not None and tables[1] % CHUNK == 0
    empty_strided, current_device, current_stream = gpu.empty_strided, gpu.current_device, gpu.current_stream

    def run(
        numbers: tuple[gpu.Shapes, Any],
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor | None,
        q: torch.Tensor | None,
        rotary_cos: torch.Tensor | None,
        rotary_sin: torch.Tensor | None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if current_device() != index:
            with torch.cuda.device(index):
                return _runner(index, dtype, tables, has_descales, bound)(
                    numbers, k_cache, v_cache, k, v, cache_seqlens, block_table, q, rotary_cos, rotary_sin, k_descale, v_descale
                )
        (shape, strides, lengths_shape, lengths_strides), of_bound = numbers
        lengths = empty_strided(lengths_shape, lengths_strides, torch.int32)
        q_rotated = empty_strided(shape, strides, dtype)
        if enqueue is not None:
            at_cache, at_values, at_lengths = k_cache.data_ptr(), v_cache.data_ptr(), cache_seqlens.data_ptr()
            at_k, at_v = (0, 0) if k is None or v is None else (k.data_ptr(), v.data_ptr())
            at_table = 0 if block_table is None else block_table.data_ptr()
            at_q = 0 if q is None else q.data_ptr()
            at_cos, at_sin = (0, 0) if rotary_cos is None or rotary_sin is None else (rotary_cos.data_ptr(), rotary_sin.data_ptr())
            together = at_cache | at_values | at_k | at_v | at_q  # q as well where it stays as it is: attention comes next
            if in_chunks:
                together |= at_cos | at_sin
            at_descales = (0, 0)
            if has_descales:
                at_descales = (0 if k_descale is None else k_descale.data_ptr(), 0 if v_descale is None else v_descale.data_ptr())
            gone = (k is not None and not (at_k and at_v)) or (q is not None and not at_q) or (block_table is not None and not at_table)
            gone = gone or (k_descale is not None and not at_descales[0]) or (v_descale is not None and not at_descales[1])
            if together % ALIGNMENT or gone or not (at_cache and at_values and at_lengths) or (rotates and not (at_cos and at_sin)):
                of_rotation = q, rotary_cos, rotary_sin
                require_append_memory(AppendTensors(k_cache, v_cache, k, v, cache_seqlens, block_table, *of_rotation, k_descale, v_descale))
            at_q = at_q if rotates else 0
            at_tables = (0, 0, at_cos, at_sin) if in_fp32 else (at_cos, at_sin, 0, 0)
            rest: tuple[int, ...] = (q_rotated.data_ptr(), lengths.data_ptr())
            if has_descales:
                rest += at_descales
            stream = current_stream(index)
            enqueue(of_bound, stream, at_cache, at_values, at_k, at_v, at_lengths, at_table, at_q, *at_tables, *rest)
            torch.autograd.graph.increment_version((k_cache, v_cache))  # so that autograd tells whoever saved one of them for a gradient
        return lengths, q_rotated

    return run


untraced(_runner(0, torch.bfloat16, None, False, None))  # marks the code, which all that it returns share
