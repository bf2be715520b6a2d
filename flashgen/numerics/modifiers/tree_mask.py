"""A mask of the last keys: see flashgen/codegen/modifiers/tree_mask.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from ..link import Link, Rows


class TreeMaskLink(Link):
    """Scores of those of the last keys that are not seen become -inf. `mask`: bool [batch, heads_q, len_q, len_q]."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        return cls(tensors["tree_mask"])

    @classmethod
    def drawn(cls, name: str, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See Link. Each key is seen by half of the queries."""
        return torch.rand(sizes, generator=generator, device=generator.device) < 0.5

    def changed(self, s: Tensor, rows: Rows) -> Tensor:
        """See Link. Of fewer keys than queries there are only the last ones."""
        assert rows.heads is not None
        keys = min(rows.len_q, rows.len_kv)
        own = self.mask[rows.batch][rows.heads, rows.queries][..., rows.len_q - keys :]
        s[..., rows.len_kv - keys :].masked_fill_(~own, -torch.inf)
        return s


LINK = TreeMaskLink
