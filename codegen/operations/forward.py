"""The forward pass of attention: out = softmax(scale * q k^T) v, and lse, the natural logarithm of the softmax's denominator, by row."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from flashgen.codegen.modifier import modified_example, modifier_operands, modifier_scalars, modifiers
from flashgen.codegen.operands import Axis, Element, Operand, Role
from flashgen.codegen.operation import Operation
from flashgen.codegen.problem import CacheDtype, Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload, equal_lengths

CACHE_SEQLENS, BLOCK_TABLE, CACHE_LEFTPAD = "cache_seqlens", "block_table", "cache_leftpad"
_QUERIES = (Axis.BATCH, Axis.LEN_Q, Axis.HEADS_Q)
_KEYS = (Axis.BATCH, Axis.LEN_KV, Axis.HEADS_KV)


class Forward(Operation):
    """See the module's docstring. Operands lie as (batch, length, head, column), whatever their strides; lse is [batch, head, length].

    Of packed sequences they lie as (token, head, column), and lse is [head, token]. Sequence b has the tokens from cu_seqlens[b] to
    cu_seqlens[b + 1] - 1, of which the first seqused[b] are there where that is given. Tokens of q that are in no sequence have out 0 and
    lse -inf.

    Of caches k and v lie as (page, key of the page, head, column). Sequence b has the pages of row b of block_table, or page b alone,
    and of their keys those from cache_leftpad[b], or 0, up to cache_seqlens[b] - 1, as far as there are so many. What modifiers call key
    0 is the first of these. Where `Problem.dtype_kv` says so, elements of k and v are multiplied by k_descale and v_descale,
    [batch, head], or 1.
    """

    name = "forward"

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Operation."""
        own = _BY_SEQUENCES[problem.sequences] if problem.dtype_kv is None else _E4M3_OPERANDS
        return (*own, *modifier_operands(problem)) if problem.modifiers else own

    def scalars(self, problem: Problem, workload: Workload) -> Mapping[str, float]:
        """See Operation. `scale`: of the scores before the softmax."""
        return {"scale": problem.head_dim**-0.5, **modifier_scalars(problem, workload)}

    def flops(self, problem: Problem, workload: Workload) -> float:
        """See Operation: 2 * (head_dim + head_dim_v) for each pair of a query and a key, half of it where the mask is causal.

        Where attention is local, for each pair that the mask, the window and the chunks let through. Of packed sequences only the device
        knows the lengths: they count as equally long.
        """
        if problem.sequences is not Sequences.DENSE:
            workload = equal_lengths(workload)
        if workload.is_local:
            pairs = float(workload.visible_pairs(problem.mask))
        else:
            pairs = workload.len_q * workload.len_kv * (0.5 if problem.mask is Mask.CAUSAL else 1.0)
        return 2.0 * workload.batch * workload.heads_q * pairs * (problem.head_dim + problem.head_dim_v)

    def io_bytes(self, problem: Problem, workload: Workload) -> int:
        """See Operation. Of a cache all keys that its sequences may have, each once."""
        if problem.is_cached:
            dense, w = replace(problem, sequences=Sequences.DENSE, dtype_kv=None), equal_lengths(workload)
            elements = w.batch * w.len_kv * w.heads_kv * (problem.head_dim + problem.head_dim_v)
            return super().io_bytes(dense, w) - elements * (problem.dtype.bytes - problem.kv_bytes)
        return super().io_bytes(problem, workload)

    def examples(self) -> tuple[tuple[Problem, Workload], ...]:
        """See Operation."""
        widths = ((8, 8), (64, 64), (72, 72), (128, 128), (192, 128), (256, 256))
        workload = Workload(batch=2, heads_q=6, heads_kv=3, len_q=100, len_kv=300)
        plain = [(Problem(Dtype.BF16, *width, mask), workload) for width, mask in itertools.product(widths, Mask)]
        tokens = replace(workload, batch=5, tokens_q=200, tokens_kv=600)
        of_packed = [Problem(Dtype.BF16, *widths[1], mask, sequences=Sequences.PACKED) for mask in Mask]
        plain += [(problem, tokens) for problem in of_packed]
        pages = Workload(5, 6, 3, 4, 6 * 48, pages=31, page_size=48, table_pages=6)
        plain += [(Problem(Dtype.BF16, *widths[1], mask, sequences=Sequences.CACHED), pages) for mask in Mask]
        plain.append((Problem(Dtype.BF16, *widths[1], Mask.CAUSAL, sequences=Sequences.CACHED, dtype_kv=CacheDtype.E4M3), pages))
        return (*plain, *(modified_example(Problem(Dtype.BF16, 64, 64, modifiers=(name,)), workload) for name in modifiers()))


_OPERANDS = (
    Operand("q", (*_QUERIES, Axis.HEAD_DIM)),
    Operand("k", (*_KEYS, Axis.HEAD_DIM)),
    Operand("v", (*_KEYS, Axis.HEAD_DIM_V)),
    Operand("out", (*_QUERIES, Axis.HEAD_DIM_V), role=Role.OUT),
    Operand("lse", (Axis.BATCH, Axis.HEADS_Q, Axis.LEN_Q), Element.F32, Role.OUT, optional=True),
)

_PACKED_OPERANDS = (
    Operand("q", (Axis.TOKENS_Q, Axis.HEADS_Q, Axis.HEAD_DIM)),
    Operand("k", (Axis.TOKENS_KV, Axis.HEADS_KV, Axis.HEAD_DIM)),
    Operand("v", (Axis.TOKENS_KV, Axis.HEADS_KV, Axis.HEAD_DIM_V)),
    Operand("out", (Axis.TOKENS_Q, Axis.HEADS_Q, Axis.HEAD_DIM_V), role=Role.OUT),
    Operand("lse", (Axis.HEADS_Q, Axis.TOKENS_Q), Element.F32, Role.OUT, optional=True),
    Operand("cu_seqlens_q", (Axis.BOUNDARIES,), Element.I32),
    Operand("cu_seqlens_kv", (Axis.BOUNDARIES,), Element.I32),
    Operand("seqused_q", (Axis.BATCH,), Element.I32, optional=True),
    Operand("seqused_kv", (Axis.BATCH,), Element.I32, optional=True),
)

_CACHED_KEYS = (Axis.PAGES, Axis.PAGE, Axis.HEADS_KV)
_CACHED_OPERANDS = (
    _OPERANDS[0],
    Operand("k", (*_CACHED_KEYS, Axis.HEAD_DIM)),
    Operand("v", (*_CACHED_KEYS, Axis.HEAD_DIM_V)),
    *_OPERANDS[3:],
    Operand(CACHE_SEQLENS, (Axis.BATCH,), Element.I32),
    Operand(BLOCK_TABLE, (Axis.BATCH, Axis.TABLE), Element.I32, optional=True),
    Operand(CACHE_LEFTPAD, (Axis.BATCH,), Element.I32, optional=True),
)
_E4M3_OPERANDS = (
    *(replace(operand, element=Element.E4M3) if operand.name in ("k", "v") else operand for operand in _CACHED_OPERANDS),
    *(Operand(name, (Axis.BATCH, Axis.HEADS_KV), Element.F32, optional=True) for name in ("k_descale", "v_descale")),
)
_BY_SEQUENCES = {Sequences.DENSE: _OPERANDS, Sequences.PACKED: _PACKED_OPERANDS, Sequences.CACHED: _CACHED_OPERANDS}

OPERATION = Forward()
