"""A mask in memory: see flashgen/codegen/modifiers/boolean_mask.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from ..link import Link, Rows


class BooleanMaskLink(Link):
    """Scores of what is not seen become -inf. `mask`: bool [batch, heads_q, len_q, len_kv]."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        return cls(tensors["mask"])

    @classmethod
    def drawn(cls, name: str, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See Link. Two of three keys are seen, but by one of 16 queries, which sees none."""
        seen = torch.rand(sizes, generator=generator, device=generator.device) < 0.66
        return seen & (torch.rand((*sizes[:3], 1), generator=generator, device=generator.device) < 15 / 16)

    def changed(self, s: Tensor, rows: Rows) -> Tensor:
        """See Link."""
        assert rows.heads is not None
        return s.masked_fill_(~self.mask[rows.batch][rows.heads, rows.queries], -torch.inf)


LINK = BooleanMaskLink
