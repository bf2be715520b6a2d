"""Documents: see flashgen/codegen/modifiers/document_ids.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from ..link import Link, Rows


class DocumentIdsLink(Link):
    """Scores of keys of other documents become -inf. `of_queries`: [batch, len_q], `of_keys`: [batch, len_kv], int32."""

    def __init__(self, of_queries: Tensor, of_keys: Tensor) -> None:
        self.of_queries, self.of_keys = of_queries, of_keys

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        return cls(tensors["document_ids_q"], tensors["document_ids_kv"])

    @classmethod
    def drawn(cls, name: str, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See Link. In order, from 0, of some 100 tokens each; a few tokens are of others."""
        device = generator.device
        ids = (torch.rand(sizes, generator=generator, device=device) < 0.01).cumsum(-1)
        others = torch.randint(4, sizes, generator=generator, device=device)
        return torch.where(torch.rand(sizes, generator=generator, device=device) < 0.002, others, ids)

    def changed(self, s: Tensor, rows: Rows) -> Tensor:
        """See Link. A prefix does not open other documents: so these scores become -inf."""
        return s.masked_fill_(self.of_queries[rows.batch][rows.queries][:, None] != self.of_keys[rows.batch], -torch.inf)


LINK = DocumentIdsLink
