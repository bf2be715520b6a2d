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
from .untraced import untraced

AppendRun = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # those of `AppendTensors`, one by one
_NOTHING = (0,)  # the shape of queries that nobody rotates


class AppendPlan:
    """Everything about a call that its signature decides.

    bound: to the kernel, None where there are no sequences; tables: element type and columns of those of the rotation, None without
    run: given the tensors of `AppendTensors`, allocates lengths and rotated queries, both dense, and enqueues the kernel on the current
    stream
    """

    def __init__(self, tensors: AppendTensors, rotary_interleaved: bool, by_query: bool) -> None:
        """Checks the arguments and binds the kernel that the selection chooses."""
        shapes, call, problem = _planned(tensors, rotary_interleaved, by_query)
        on, cache = gpu.gpu_of(tensors.k_cache, "k_cache"), tensors.k_cache
        families_for(problem, on.device.target)
        self.tables = None if tensors.rotary_cos is None else (tensors.rotary_cos.dtype, tensors.rotary_cos.shape[1])
        self.before: Any = None  # what knows the next call of this signature at once: see operators/append.py
        self.met = True  # whether it has run a call
        self._of_cache = cache.device.index, tensors.dtype, self.tables, cache.dtype is E4M3
        self.bound = None if call is None else gpu.bind_chosen(call, on)
        self.run = _runner(*self._of_cache, *shapes, self.bound)
        gpu.require_context(cache.device.index)

    def numbers(self, *arguments: Any) -> tuple[Any, ...]:
        """What `with_numbers` takes of another call: of the arguments of `AppendPlan`, with `SizedTensor`s, but for tables."""
        shapes, call, _ = _planned(*arguments)
        assert call is not None
        assert self.bound is not None
        return shapes, *gpu.chosen_numbers(call, self.bound)

    def with_numbers(self, shapes: tuple[Any, ...], *of_bound: Any) -> AppendPlan:
        """The plan of a call that differs from this plan's in `numbers` alone."""
        assert self.bound is not None
        other = object.__new__(AppendPlan)
        other.tables, other._of_cache, other.before, other.met = self.tables, self._of_cache, None, False
        other.bound = self.bound.with_numbers(*of_bound)
        other.run = _runner(*self._of_cache, shapes[0], shapes[1], other.bound)
        return other


def _planned(
    tensors: AppendTensors, rotary_interleaved: bool, by_query: bool
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], Call | None, Problem]:
    """Of tensors, which are checked, or `SizedTensor`s: shapes of queries and lengths, the call, None without sequences, its problem."""
    problem = check_append(tensors, rotary_interleaved, by_query)
    call = append_call(problem, tensors, rotary_interleaved, by_query)
    return (rotated_shape(tensors), (call.workload.batch,)), call if call.workload.batch else None, problem


def rotated_shape(tensors: AppendTensors) -> tuple[int, ...]:
    """Of the queries that a call gives."""
    return _NOTHING if tensors.rotated is None else tuple(tensors.rotated.shape)


def _runner(
    index: int,
    dtype: torch.dtype,
    tables: tuple[torch.dtype, int] | None,
    has_descales: bool,
    shape: tuple[int, ...],
    lengths_shape: tuple[int, ...],
    bound: BoundCall | None,
) -> AppendRun:
    """`AppendPlan.run`. tables: element type and columns of those of the rotation; bound: None where there are no sequences.

    has_descales: whether the kernel takes some
    """
    enqueue = None if bound is None else bound.enqueue
    strides, lengths_strides = dense(shape), dense(lengths_shape)
    rotates, in_fp32 = tables is not None, tables is not None and tables[0] == torch.float32
    in_chunks = tables is not None and tables[1] % CHUNK == 0
    empty_strided, current_device, current_stream = gpu.empty_strided, gpu.current_device, gpu.current_stream

    def run(
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
                return _runner(index, dtype, tables, has_descales, shape, lengths_shape, bound)(
                    k_cache, v_cache, k, v, cache_seqlens, block_table, q, rotary_cos, rotary_sin, k_descale, v_descale
                )
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
            enqueue(current_stream(index), at_cache, at_values, at_k, at_v, at_lengths, at_table, at_q, *at_tables, *rest)
            torch.autograd.graph.increment_version((k_cache, v_cache))  # so that autograd tells whoever saved one of them for a gradient
        return lengths, q_rotated

    return run


untraced(_runner(0, torch.bfloat16, None, False, _NOTHING, _NOTHING, None))  # marks the code, which all that it returns share
