"""Documents: a query sees the keys of its own document, among those that all other masks let it see.

Each query and each key of an entry of the batch has a number, that of its document. They need not be in order, but where they are, tiles
of keys that no query of a tile sees cost no time.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.modifier import Modifier
from flashgen.codegen.operands import Axis, Call, Element, Operand
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.problem import Problem

DOCUMENT_IDS = "document_ids"
IDS_Q, IDS_KV = "document_ids_q", "document_ids_kv"


class DocumentIds(Modifier):
    """See the module's docstring."""

    name = DOCUMENT_IDS
    rank = 26
    link = "DocumentIds"
    words = "documents"
    parameters = (
        *(Parameter("const int*", name) for name in (IDS_Q, IDS_KV)),
        *(Parameter("i64", f"{name}_batch") for name in (IDS_Q, IDS_KV)),
    )
    tensors = (IDS_Q, IDS_KV)
    has_heads = True
    scattered_by = (Axis.BATCH,)

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Modifier. [batch, len_q] and [batch, len_kv], int32."""
        return (
            Operand(IDS_Q, (Axis.BATCH, Axis.LEN_Q), Element.I32),
            Operand(IDS_KV, (Axis.BATCH, Axis.LEN_KV), Element.I32),
        )

    def values(self, call: Call) -> Mapping[str, int | float]:
        """See Modifier. Steps from one entry of the batch to the next: 0 where they are alike."""
        return {f"{name}_batch": call.views[name].strides[0] for name in self.tensors}


MODIFIER = DocumentIds()
