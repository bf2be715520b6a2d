"""What of an expression a kernel can compute once: for a head, for a row of scores (a query), or for a column (a key)."""

from __future__ import annotations

from dataclasses import dataclass

from .tree import Expression, dependences, nodes_of

_OF_HEAD = frozenset(("batch", "head"))
_OF_ROW, _OF_COLUMN = _OF_HEAD | {"query"}, _OF_HEAD | {"key"}


@dataclass(frozen=True)
class Stages:
    """The largest parts of trees that depend on no more than batch and head; on these and the query; on these and the key.

    Leaves and their opposites are none of them, but loads are.
    Parts of a row or a column may have parts of a head: `cxx.printed` takes these as inputs.
    """

    of_head: tuple[Expression, ...]
    of_row: tuple[Expression, ...]
    of_column: tuple[Expression, ...]


def stages_of(*trees: Expression) -> Stages:
    """The stages of one or more trees, which a kernel computes together."""
    depends, nodes = dependences(*trees), nodes_of(*trees)

    def stage(node: Expression) -> int:
        on = depends[node]
        return 0 if on <= _OF_HEAD else 1 if on <= _OF_ROW else 2 if on <= _OF_COLUMN else 3

    ends = dict.fromkeys(trees)
    ends |= {operand: None for node in nodes for operand in node.operands if stage(operand) != stage(node)}
    leaves = ("input", "number", "constant")
    inner = [node for node in nodes if node in ends and (node.operands[0] if node.operation == "neg" else node).operation not in leaves]
    return Stages(*(tuple(node for node in inner if stage(node) == wanted) for wanted in range(3)))
