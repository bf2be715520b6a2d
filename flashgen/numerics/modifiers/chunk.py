"""Chunks: see flashgen/codegen/modifiers/chunk.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from torch import Tensor

from ..link import Link, Rows


class ChunkLink(Link):
    """Hides keys of other chunks than the one that a query's own position, the last of the causal mask, lies in."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        return cls(int(scalars["chunk"]))

    def hidden(self, rows: Rows) -> Tensor | None:
        """See Link."""
        return rows.keys // self.chunk != rows.causal_last // self.chunk


LINK = ChunkLink
