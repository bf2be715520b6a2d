"""Sinks: see flashgen/codegen/modifiers/sinks.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from ..link import Link, Rows


class SinksLink(Link):
    """A score of each query head that joins its rows. `sinks`: [heads_q], fp32."""

    def __init__(self, sinks: Tensor) -> None:
        self.sinks = sinks

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        return cls(tensors["sinks"])

    @classmethod
    def drawn(cls, name: str, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See Link. Some of them take nearly all of a row of some hundred keys, some next to nothing."""
        return torch.randn(sizes, generator=generator, device=generator.device).mul_(3).add_(4)

    def joined(self, rows: Rows) -> Tensor | None:
        """See Link."""
        assert rows.heads is not None
        return self.sinks[rows.heads]

    def add_joined(self, sums: Mapping[str, Tensor], d_joined: Tensor, rows: Rows) -> None:
        """See Link."""
        assert rows.heads is not None
        sums["d_sinks"].index_add_(0, rows.heads.flatten(), d_joined.to(sums["d_sinks"].dtype).flatten())


LINK = SinksLink
