"""New keys and values of sequences, written behind those that a cache has of them, with rotary position embedding of keys and queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashgen.codegen.operands import Axis, Element, Operand, Role
from flashgen.codegen.operation import Operation
from flashgen.codegen.problem import CacheDtype, Dtype, Problem, Sequences
from flashgen.codegen.workload import Workload


class Append(Operation):
    """See the module's docstring. Caches lie as (page, key of the page, head, column), what is new as (batch, token, head, column).

    New key i of sequence b is written at position cache_seqlens[b] + i: to the page block_table[b, position / page_size], or without
    block_table to page b, whose keys are then all that the sequence may have. A length below 0 counts as 0. A position behind the pages
    that a sequence may have is not written, nor is one whose page is none of the cache. `lengths` are how long sequences are then.

    The first `rotary_dim` columns of keys are rotated by row `position` of the tables [rotary_positions, rotary_dim / 2] of cosines and
    sines, those of queries by row cache_seqlens[b] + i, or without `rotary_by_query` all by row cache_seqlens[b]; beyond the last row
    by that. Tables are there in the elements' type or in fp32, which is taken where both are there; without any, nothing is rotated.
    Pairs of columns are 2 j and 2 j + 1 with `rotary_interleaved` (GPT-J), else j and j + rotary_dim / 2 (GPT-NeoX). Values are not
    rotated. Where `Problem.dtype_kv` says so, elements of caches are what is written divided by k_descale and v_descale, [batch, head] or
    1, rounded, and at most the largest such number.
    """

    name = "append"
    is_attention = False

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Operation."""
        return _OPERANDS if problem.dtype_kv is None else _E4M3_OPERANDS

    def scalars(self, problem: Problem, workload: Workload) -> Mapping[str, float]:
        """See Operation, and the class. All are whole numbers; tables usually end before the cache does."""
        usual = {"rotary_dim": problem.head_dim // 2, "rotary_positions": max(1, workload.len_kv - workload.len_kv // 4)}
        return {**usual, "rotary_interleaved": 0, "rotary_by_query": 1}

    def flops(self, problem: Problem, workload: Workload) -> float:
        """See Operation: of each element of a key or query two products and an addition, as if all columns were rotated."""
        w = workload
        return 3.0 * w.batch * (w.new_keys * w.heads_kv + w.len_q * w.heads_q) * problem.head_dim

    def io_bytes(self, problem: Problem, workload: Workload) -> int:
        """See Operation. Of a cache what is written alone."""
        w, element = workload, problem.dtype.bytes
        appended = w.new_keys * w.heads_kv * (problem.head_dim + problem.head_dim_v)
        return w.batch * ((element + problem.kv_bytes) * appended + 2 * element * w.len_q * w.heads_q * problem.head_dim + 8)

    def sizes_to_verify(self, workload: Workload) -> Workload:
        """See Operation: as many new keys as queries."""
        return replace(workload, new_keys=workload.len_q)

    def examples(self) -> tuple[tuple[Problem, Workload], ...]:
        """See Operation."""
        workload = Workload(3, 4, 2, 5, 48, pages=12, page_size=16, table_pages=3, new_keys=7)
        widths = ((Dtype.BF16, 64, 64), (Dtype.FP16, 192, 128), (Dtype.BF16, 72, 8))
        problems = [Problem(*one, operation=self.name, sequences=Sequences.CACHED) for one in widths]
        return tuple((problem, workload) for problem in (*problems, replace(problems[0], dtype_kv=CacheDtype.E4M3)))


_CACHED = (Axis.PAGES, Axis.PAGE, Axis.HEADS_KV)
_NEW = (Axis.BATCH, Axis.NEW_KEYS, Axis.HEADS_KV)
_QUERIES = (Axis.BATCH, Axis.LEN_Q, Axis.HEADS_Q, Axis.HEAD_DIM)
_OPERANDS = (
    Operand("k_cache", (*_CACHED, Axis.HEAD_DIM), role=Role.INOUT),
    Operand("v_cache", (*_CACHED, Axis.HEAD_DIM_V), role=Role.INOUT),
    Operand("k_new", (*_NEW, Axis.HEAD_DIM)),
    Operand("v_new", (*_NEW, Axis.HEAD_DIM_V)),
    Operand("cache_seqlens", (Axis.BATCH,), Element.I32),
    Operand("block_table", (Axis.BATCH, Axis.TABLE), Element.I32, optional=True),
    Operand("q", _QUERIES),
    *(Operand(name, (), optional=True, free=True) for name in ("rotary_cos", "rotary_sin")),
    *(Operand(name, (), Element.F32, optional=True, free=True) for name in ("rotary_cos_fp32", "rotary_sin_fp32")),
    Operand("q_rotated", _QUERIES, role=Role.OUT),
    Operand("lengths", (Axis.BATCH,), Element.I32, Role.OUT),
)
_E4M3_OPERANDS = (
    *(replace(operand, element=Element.E4M3) for operand in _OPERANDS[:2]),
    *_OPERANDS[2:],
    *(Operand(name, (Axis.BATCH, Axis.HEADS_KV), Element.F32, optional=True) for name in ("k_descale", "v_descale")),
)

OPERATION = Append()
