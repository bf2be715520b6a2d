"""A softcap: see flashgen/codegen/modifiers/softcap.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from torch import Tensor

from ..link import Link, Rows


class SoftcapLink(Link):
    """cap * tanh(s / cap), as plain PyTorch computes it in the scores' element type."""

    def __init__(self, cap: float) -> None:
        self.cap = cap

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        return cls(scalars["softcap"])

    def changed(self, s: Tensor, rows: Rows) -> Tensor:
        """See Link."""
        return s.div_(self.cap).tanh_().mul_(self.cap)

    def derivative(self, changed: Tensor, before: Tensor | None, rows: Rows) -> Tensor | None:
        """See Link."""
        return 1 - (changed / self.cap).square()


LINK = SoftcapLink
