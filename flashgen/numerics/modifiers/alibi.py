"""ALiBi: see flashgen/codegen/modifiers/alibi.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from ..link import Link, Rows


class AlibiLink(Link):
    """Subtracts slope * |distance|. `slopes`: [batch, heads_q], fp32."""

    def __init__(self, slopes: Tensor) -> None:
        self.slopes = slopes

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        return cls(tensors["alibi_slopes"])

    @classmethod
    def drawn(cls, name: str, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See Link. Between 2^-8 and 1, as Press et al. have them."""
        return torch.rand(sizes, generator=generator, device=generator.device).mul_(-8).exp2_()

    def changed(self, s: Tensor, rows: Rows) -> Tensor:
        """See Link."""
        assert rows.heads is not None
        slopes = self.slopes[rows.batch][rows.heads].to(s.dtype)  # [n, rows]
        distance = (rows.causal_last - rows.keys).abs().to(s.dtype)  # [rows, len_kv]
        return s.sub_(slopes[..., None] * distance)


LINK = AlibiLink
