"""The backward pass of attention: dQ, dK and dV from dO, by recomputation from the log-sum-exp (Dao 2023, algorithm 2).

With P = exp(scale * q k^T - lse), dP = d_out v^T and delta = rowsum(d_out * out) - d_lse:
    d_v = P^T d_out,    dS = P * (dP - delta),    d_q = scale * dS k,    d_k = scale * dS^T q.
Gradients of a key/value head are sums over the query heads that share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from flashgen.codegen.modifier import modified_example, modifier_gradients, modifier_operands, modifier_scalars, modifiers
from flashgen.codegen.operands import Axis, Element, Operand, Role
from flashgen.codegen.operation import Operation
from flashgen.codegen.operations.forward import OPERATION as FORWARD
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload

_QUERIES = (Axis.BATCH, Axis.LEN_Q, Axis.HEADS_Q)
_KEYS = (Axis.BATCH, Axis.LEN_KV, Axis.HEADS_KV)
_ROWS = (Axis.BATCH, Axis.HEADS_Q, Axis.LEN_Q)
_QUERY_TOKENS = (Axis.TOKENS_Q, Axis.HEADS_Q)
_KEY_TOKENS = (Axis.TOKENS_KV, Axis.HEADS_KV)
_ROW_TOKENS = (Axis.HEADS_Q, Axis.TOKENS_Q)


class Backward(Operation):
    """See the module's docstring. `out` and `lse` are what the forward pass computed; d_lse, the gradient into lse, may be left out.

    Packed sequences lie as they do in the forward pass. Gradients of tokens that are in no sequence are 0.
    """

    name = "backward"

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Operation."""
        own = _PACKED_OPERANDS if problem.is_packed else _OPERANDS
        return (*own, *modifier_operands(problem), *modifier_gradients(problem)) if problem.modifiers else own

    def scalars(self, problem: Problem, workload: Workload) -> Mapping[str, float]:
        """See Operation. `scale`: of the scores before the softmax, that of the forward pass."""
        return {"scale": problem.head_dim**-0.5, **modifier_scalars(problem, workload)}

    def flops(self, problem: Problem, workload: Workload) -> float:
        """See Operation: 2.5 times the forward pass, as FlashAttention counts: five products of one width for two."""
        return 2.5 * FORWARD.flops(problem, workload)

    def examples(self) -> tuple[tuple[Problem, Workload], ...]:
        """See Operation."""
        widths = ((8, 8), (64, 64), (72, 72), (128, 128), (192, 128), (256, 256))
        workload = Workload(batch=2, heads_q=6, heads_kv=3, len_q=100, len_kv=300)
        problems = [Problem(Dtype.BF16, *width, mask, self.name) for width, mask in itertools.product(widths, Mask)]
        problems += [Problem(Dtype.BF16, width, width, Mask.CAUSAL, self.name, deterministic=True) for width in (64, 256)]
        plain = [(problem, workload) for problem in problems]
        modified = [
            Problem(Dtype.BF16, width, width, Mask.FULL, self.name, deterministic, (name,))
            for width, deterministic in ((64, False), (64, True), (256, False))
            for name, modifier in modifiers().items()
            if not modifier.for_inference
        ]
        tokens = replace(workload, batch=5, tokens_q=200, tokens_kv=600)
        plain += [(Problem(Dtype.BF16, 64, 64, mask, self.name, sequences=Sequences.PACKED), tokens) for mask in Mask]
        plain.append((Problem(Dtype.BF16, 64, 64, Mask.CAUSAL, self.name, deterministic=True, sequences=Sequences.PACKED), tokens))
        return (*plain, *(modified_example(problem, workload) for problem in modified))


_OPERANDS = (
    Operand("q", (*_QUERIES, Axis.HEAD_DIM)),
    Operand("k", (*_KEYS, Axis.HEAD_DIM)),
    Operand("v", (*_KEYS, Axis.HEAD_DIM_V)),
    Operand("out", (*_QUERIES, Axis.HEAD_DIM_V)),
    Operand("lse", _ROWS, Element.F32),
    Operand("d_out", (*_QUERIES, Axis.HEAD_DIM_V)),
    Operand("d_lse", _ROWS, Element.F32, optional=True),
    Operand("d_q", (*_QUERIES, Axis.HEAD_DIM), role=Role.OUT),
    Operand("d_k", (*_KEYS, Axis.HEAD_DIM), role=Role.OUT),
    Operand("d_v", (*_KEYS, Axis.HEAD_DIM_V), role=Role.OUT),
)

_PACKED_OPERANDS = (
    Operand("q", (*_QUERY_TOKENS, Axis.HEAD_DIM)),
    Operand("k", (*_KEY_TOKENS, Axis.HEAD_DIM)),
    Operand("v", (*_KEY_TOKENS, Axis.HEAD_DIM_V)),
    Operand("out", (*_QUERY_TOKENS, Axis.HEAD_DIM_V)),
    Operand("lse", _ROW_TOKENS, Element.F32),
    Operand("d_out", (*_QUERY_TOKENS, Axis.HEAD_DIM_V)),
    Operand("d_lse", _ROW_TOKENS, Element.F32, optional=True),
    Operand("d_q", (*_QUERY_TOKENS, Axis.HEAD_DIM), role=Role.OUT),
    Operand("d_k", (*_KEY_TOKENS, Axis.HEAD_DIM), role=Role.OUT),
    Operand("d_v", (*_KEY_TOKENS, Axis.HEAD_DIM_V), role=Role.OUT),
    Operand("cu_seqlens_q", (Axis.BOUNDARIES,), Element.I32),
    Operand("cu_seqlens_kv", (Axis.BOUNDARIES,), Element.I32),
    Operand("seqused_q", (Axis.BATCH,), Element.I32, optional=True),
    Operand("seqused_kv", (Axis.BATCH,), Element.I32, optional=True),
)

OPERATION = Backward()
