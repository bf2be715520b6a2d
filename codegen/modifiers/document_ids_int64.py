"""Documents whose ids are int64, as PyTorch's cumsum gives them: see document_ids.py."""

from __future__ import annotations

from flashgen.codegen.operands import Element

from .document_ids import DocumentIds, id_parameters


class DocumentIdsInt64(DocumentIds):
    """See the module's docstring."""

    name = "document_ids_int64"
    link = "DocumentIds<i64>"
    words = "documents of int64 ids"
    element = Element.I64
    parameters = id_parameters("i64")


MODIFIER = DocumentIdsInt64()
