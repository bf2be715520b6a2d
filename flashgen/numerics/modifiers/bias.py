"""A bias in memory: see flashgen/codegen/modifiers/bias.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from torch import Tensor

from ..link import Link, Rows


class BiasLink(Link):
    """Adds to scaled scores. `bias`: [batch, heads_q, len_q, len_kv]."""

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        return cls(tensors["bias"])

    def changed(self, s: Tensor, rows: Rows) -> Tensor:
        """See Link."""
        assert rows.heads is not None
        return s.add_(self.bias[rows.batch][rows.heads, rows.queries].to(s.dtype))

    def add_gradients(self, sums: Mapping[str, Tensor], d_scores: Tensor, rows: Rows, before: Tensor | None, squared: bool = False) -> None:
        """See Link. An element is one score's: its error is no sum."""
        assert rows.heads is not None
        if "d_bias" in sums and not squared:  # not where scores are mapped
            sums["d_bias"][rows.batch][rows.heads[0], rows.queries] += d_scores.to(sums["d_bias"].dtype)


LINK = BiasLink
