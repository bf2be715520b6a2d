"""Whether what a peer computes is what was asked for: what is fast but something else gets no time."""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Mask

from ..cells import Cell
from ..numerics.oracle import oracle_of
from ..numerics.rule import judge

SAMPLED_ROWS = 256
# Of a row's norm. Rounding probabilities and out to bf16 costs about 0.3 %; another mask, head, scale or order of dimensions all of it.
ROW_TOLERANCE = 0.02


class CellCheck:
    """The float64 reference of one set of inputs, on sampled rows."""

    def __init__(self, cell: Cell, q: Tensor, k: Tensor, v: Tensor, seed: int = 0) -> None:
        """q, k, v are in layout bshd."""
        self.cell, self.causal = cell, cell.problem.mask is Mask.CAUSAL
        self._oracle, self._inputs = oracle_of(cell.problem), {"q": q, "k": k, "v": v}
        self._scalars = operation_of(cell.problem).scalars(cell.problem)
        self._rows = self._oracle.sample(cell.problem, cell.workload, SAMPLED_ROWS, seed).to(q.device)
        self._exact = self._oracle.exact(cell.problem, self._inputs, self._scalars, self._rows)
        self._shape = (*q.shape[:3], v.shape[3])

    def fault(self, out: Tensor) -> str:
        """What is wrong with `out` (layout bshd), empty if nothing: each sampled row must be the reference's within 2 % of its norm."""
        if out.shape != self._shape:
            return f"wrong: out has shape {tuple(out.shape)}, not {self._shape}"
        batch, head, row = self._rows.unbind(1)
        given, ref = out[batch, row, head].double(), self._exact["out"]
        allowed = ROW_TOLERANCE * ref.norm(dim=1)
        wrong = ~((given - ref).norm(dim=1) <= allowed)  # also where out is NaN
        if not wrong.any():
            return ""
        b, h, i = self._rows[wrong][0].tolist()
        return f"wrong: {int(wrong.sum())} of {len(wrong)} sampled rows are not the reference's, first batch {b}, head {h}, query {i}"

    def rule(self, out: Tensor, lse: Tensor) -> str:
        """What the numerics rule says of (out, lse) on the sampled rows, empty if it is kept."""
        plain = self._oracle.plain(self.cell.problem, self._inputs, self._scalars, self._rows)
        given = self._oracle.sampled({"out": out, "lse": lse}, self._rows)
        unseen = self._oracle.unseen(self.cell.problem, self.cell.workload, self._exact, self._rows)
        verdict = judge(given, self._exact, plain, unseen)
        return "" if verdict.ok else f"wrong: {verdict.message}"


def poison(cell: Cell, like: Tensor) -> None:
    """Leaves NaN in memory that an output of this cell is likely to get next: an earlier peer's right result must not be found there."""
    w = cell.workload
    torch.full((w.batch, w.len_q, w.heads_q, cell.problem.head_dim_v), torch.nan, dtype=like.dtype, device=like.device)
