"""The value of an expression by functions that a caller has: of numbers, or of arrays and tensors that broadcast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .tree import Expression, nodes_of


def evaluate(tree: Expression, leaf: Callable[[Expression, tuple[Any, ...]], Any], operators: Mapping[str, Callable[..., Any]]) -> Any:
    """The value of a tree.

    leaf:      given an input, a number, a constant or a load, and of a load the values of its indices
    operators: a function for each of `operators.OPERATORS`, which says what it means
    """
    values: dict[Expression, Any] = {}
    for node in nodes_of(tree):
        given = tuple(values[operand] for operand in node.operands)
        if node.operation in ("input", "number", "constant", "load"):
            values[node] = leaf(node, given)
        else:
            values[node] = operators[node.operation](*given)
    return values[tree]
