"""A bias in memory: see flashgen/codegen/modifiers/bias.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from ..link import Link, Rows


class BiasLink(Link):
    """Adds to scaled scores. `bias`: [batch, heads_q, len_q, len_kv], or 1 along some of these."""

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        return cls(tensors["bias"])

    def changed(self, s: Tensor, rows: Rows) -> Tensor:
        """See Link."""
        assert rows.heads is not None
        batch, heads, queries = _indices(self.bias, rows, rows.heads)
        return s.add_(self.bias[batch][heads, queries].to(s.dtype))

    def add_gradients(self, sums: Mapping[str, Tensor], d_scores: Tensor, rows: Rows, before: Tensor | None, squared: bool = False) -> None:
        """See Link. The error of an element is a sum only where it is that of all queries: else of few scores, mostly of one."""
        assert rows.heads is not None
        if "d_bias" not in sums:  # where scores are mapped
            return
        total = sums["d_bias"]
        if squared and (total.shape[2] != 1 or rows.len_q == 1):
            return
        batch, heads, queries = _indices(total, rows, rows.heads[0])
        own = (d_scores.square() if squared else d_scores).to(total.dtype)
        own = own.sum(-1, keepdim=True) if total.shape[3] == 1 else own[:, : total.shape[3]]  # packed sequences may be longer, or shorter
        there = rows.queries < total.shape[2] if total.shape[2] > 1 else torch.ones_like(rows.queries, dtype=torch.bool)
        total[batch][..., : own.shape[1]].index_put_((heads[there], queries[there]), own[there], accumulate=True)


def _indices(tensor: Tensor, rows: Rows, heads: Tensor) -> tuple[int, Tensor, Tensor]:
    """Where the rows are in a tensor that may be 1 along the batch, the heads or the queries."""
    batch, last = min(rows.batch, tensor.shape[0] - 1), [size - 1 for size in tensor.shape[1:3]]
    return batch, heads.clamp(max=last[0]), rows.queries.clamp(max=last[1])


LINK = BiasLink
