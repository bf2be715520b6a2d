"""Documents: a query sees the keys of its own document, among those that all other masks let it see. Their ids are int32.

Each query and each key of an entry of the batch has a number, that of its document. They need not be in order, but where they are, tiles
of keys that no query of a tile sees cost no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from flashgen.codegen.modifier import Modifier
from flashgen.codegen.operands import Axis, Call, Element, Operand
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.problem import Problem

DOCUMENT_IDS = "document_ids"
IDS_Q, IDS_KV = "document_ids_q", "document_ids_kv"


def id_parameters(c_type: str) -> tuple[Parameter, ...]:
    """Where ids of that type lie, and how far the next entry of the batch is."""
    return (
        *(Parameter(f"const {c_type}*", name) for name in (IDS_Q, IDS_KV)),
        *(Parameter("i64", f"{name}_batch") for name in (IDS_Q, IDS_KV)),
    )


class DocumentIds(Modifier):
    """See the module's docstring."""

    name = DOCUMENT_IDS
    rank = 26
    link = "DocumentIds<int>"
    words = "documents"
    element: ClassVar[Element] = Element.I32
    parameters = id_parameters("int")
    tensors = (IDS_Q, IDS_KV)
    has_heads = True
    scattered_by = (Axis.BATCH,)

    @property
    def tile_file(self) -> str:
        """See Modifier. The same for both types of ids."""
        return f"modifiers/{DOCUMENT_IDS}"

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Modifier. [batch, len_q] and [batch, len_kv]."""
        return (
            Operand(IDS_Q, (Axis.BATCH, Axis.LEN_Q), self.element),
            Operand(IDS_KV, (Axis.BATCH, Axis.LEN_KV), self.element),
        )

    def values(self, call: Call) -> Mapping[str, int | float]:
        """See Modifier. Steps from one entry of the batch to the next: 0 where they are alike."""
        return {f"{name}_batch": call.views[name].strides[0] for name in self.tensors}


MODIFIER = DocumentIds()
