"""`Expected`: what a kernel must compute for one set of tensors, and the verdict on what it wrote."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..launch.tensors import Tensors
from ..numerics import forward, rule
from ..numerics.forward import reference
from ..numerics.rule import Verdict


@dataclass(frozen=True)
class Expected:
    """The reference and plain PyTorch for one set of tensors: whole, or for the sampled `rows` [n, 3]."""

    rows: torch.Tensor | None
    ref: tuple[torch.Tensor, torch.Tensor]
    plain: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, tensors: Tensors, causal: bool, scale: float, rows: torch.Tensor | None = None) -> Expected:
        """Computed once for all candidates."""
        q, k, v = tensors.q, tensors.k, tensors.v
        return cls(
            rows,
            reference(q, k, v, causal=causal, scale=scale, rows=rows),
            forward.plain(q, k, v, causal=causal, scale=scale, rows=rows),
        )

    def judge(self, tensors: Tensors) -> Verdict:
        """The numerics rule on what a kernel wrote."""
        out, lse = tensors.out, tensors.lse
        if self.rows is not None:
            batch, head, row = self.rows.unbind(1)
            out, lse = out[batch, row, head], lse[batch, head, row]
        return rule.judge(out, lse, self.ref, self.plain, tensors.q.dtype)
