"""A prefix (prefix-LM): every query sees the first keys of its entry of the batch, whatever the causal mask, a window or chunks hide.

So a query sees the keys j < prefix_len[b], and those that the causal mask, the window and chunks let it see, of both those that masks in
memory let it see. A length below 0 counts as 0, one beyond len_kv as len_kv (Raffel et al. 2020, section 3.2.1; PaliGemma).
"""

from __future__ import annotations

from flashgen.codegen.modifier import Modifier
from flashgen.codegen.operands import Axis, Element, Operand
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.problem import Problem

PREFIX_LEN = "prefix_len"


class PrefixLen(Modifier):
    """See the module's docstring. Lengths lie on the device: nobody else knows how many keys queries see."""

    name = "prefix_len"
    rank = 25
    link = "Prefix"
    words = "prefix"
    parameters = (Parameter("const int*", PREFIX_LEN),)
    tensors = (PREFIX_LEN,)
    opens = masks_by_key = True

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Modifier. [batch], int32."""
        return (Operand(PREFIX_LEN, (Axis.BATCH,), Element.I32),)


MODIFIER = PrefixLen()
