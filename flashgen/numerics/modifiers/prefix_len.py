"""A prefix: see flashgen/codegen/modifiers/prefix_len.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from ..link import Link, Rows


class PrefixLink(Link):
    """Shows the first keys of each entry of the batch. `lengths`: [batch], int32."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        return cls(tensors["prefix_len"])

    @classmethod
    def drawn(cls, name: str, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See Link. Short and long ones, from 0 to 511."""
        return torch.rand(sizes, generator=generator, device=generator.device).mul_(9).exp2_().sub_(1)

    def opened(self, rows: Rows) -> Tensor | None:
        """See Link."""
        return rows.keys < self.lengths[rows.batch]


LINK = PrefixLink
