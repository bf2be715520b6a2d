"""Documents whose ids are int64: see flashgen/codegen/modifiers/document_ids_int64.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .document_ids import DocumentIdsLink


class DocumentIdsInt64Link(DocumentIdsLink):
    """See the module's docstring."""

    @classmethod
    def drawn(cls, name: str, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See Link. Neither the lower nor the upper 32 bits alone tell all documents apart."""
        return (super().drawn(name, sizes, generator) - 1) * 2**31


LINK = DocumentIdsInt64Link
