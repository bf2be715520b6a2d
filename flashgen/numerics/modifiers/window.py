"""A sliding window: see flashgen/codegen/modifiers/window.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from torch import Tensor

from ..link import Link, Rows


class WindowLink(Link):
    """Hides keys more than `left` before, or more than `right` behind, the last one of the causal mask."""

    def __init__(self, left: int, right: int) -> None:
        self.left, self.right = left, right

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        return cls(int(scalars["window_left"]), int(scalars["window_right"]))

    def hidden(self, rows: Rows) -> Tensor | None:
        """See Link."""
        return (rows.keys < rows.causal_last - self.left) | (rows.keys > rows.causal_last + self.right)


LINK = WindowLink
