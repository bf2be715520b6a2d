"""A mask in memory: query i of a head sees key j where its element is True, among those that all other masks let it see.

For each head and each entry of the batch, or the same for some: [batch, 1, 1, len_kv] says which keys are padding.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.modifier import Modifier
from flashgen.codegen.operands import Call, Element, Operand
from flashgen.codegen.problem import Problem
from flashgen.codegen.score_tensors import (
    TILE_FILE,
    length_parameters,
    length_values,
    score_operand,
    score_parameters,
    score_refusals,
    score_values,
)

MASK = "mask"


class BooleanMask(Modifier):
    """See the module's docstring. Its link makes scores -inf, so it is one of those that change them."""

    name = "boolean_mask"
    rank = 15
    link = "BooleanMask"
    words = "mask"
    parameters = score_parameters(MASK, "unsigned char")
    packed_parameters = length_parameters(MASK)
    tensors = (MASK,)
    tiles = (TILE_FILE,)
    adds_to_scores = True
    has_heads = reads_scores = True

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Modifier."""
        return (score_operand(MASK, Element.BOOL),)

    def values(self, call: Call) -> Mapping[str, int | float]:
        """See Modifier."""
        return {**score_values(MASK, MASK, call), **length_values(MASK, call)}

    def call_refusals(self, call: Call) -> list[str]:
        """See Modifier."""
        return score_refusals(MASK, call)


MODIFIER = BooleanMask()
