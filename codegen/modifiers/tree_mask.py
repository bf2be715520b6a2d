"""A mask of the last keys, as many as there are queries: of guessed tokens in a tree, whose keys are the last ones of their sequence.

Query i of a head sees key len_kv - len_q + j where element (i, j) is True, among those that all other masks let it see, and all keys before
those. For each head and each entry of the batch, or the same for some.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.modifier import Modifier
from flashgen.codegen.operands import Axis, Call, Element, Operand
from flashgen.codegen.problem import Problem
from flashgen.codegen.score_tensors import TILE_FILE, score_parameters, score_refusals, score_values

TREE_MASK = "tree_mask"


class TreeMask(Modifier):
    """See the module's docstring. Its link makes scores -inf, so it is one of those that change them."""

    name = "tree_mask"
    rank = 16
    link = "TreeMask"
    words = "tree mask"
    parameters = score_parameters(TREE_MASK, "unsigned char")
    tensors = (TREE_MASK,)
    tiles = (TILE_FILE,)
    adds_to_scores = True
    has_heads = reads_scores = for_inference = True

    @property
    def conditions(self) -> Mapping[str, object]:
        """See Modifier. looks: whether a link looks at what it has in memory of the fragments of few keys."""
        return {"looks": True}

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Modifier. [batch, heads_q, len_q, len_q], with any strides."""
        return (Operand(TREE_MASK, (Axis.BATCH, Axis.HEADS_Q, Axis.LEN_Q, Axis.LEN_Q), Element.BOOL),)

    def values(self, call: Call) -> Mapping[str, int | float]:
        """See Modifier."""
        return score_values(TREE_MASK, TREE_MASK, call)

    def call_refusals(self, call: Call) -> list[str]:
        """See Modifier."""
        return score_refusals(TREE_MASK, call)


MODIFIER = TreeMask()
