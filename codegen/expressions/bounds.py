"""Between which numbers the integers of an expression lie: so that what cannot overflow is written as plain arithmetic."""

from __future__ import annotations

from .tree import BITS, BOOL, INT32, LOADED_AS, Expression, ScalarType, nodes_of

INPUT_LIMITS = {"batch": 2**24, "head": 2**24, "query": 2**29, "key": 2**29}
"""Batches, heads, queries and keys are below these, or a kernel may compute something else."""
NUMBER_LIMIT = 2**30
"""Run-time integers are from -NUMBER_LIMIT to NUMBER_LIMIT: others are constants."""

Range = tuple[int, int]
_LOADED: dict[str, Range] = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-(2**15), 2**15 - 1)}


def range_of_type(type: ScalarType) -> Range:
    """All that an integer type holds."""
    return -(2 ** (BITS[type] - 1)), 2 ** (BITS[type] - 1) - 1


def ranges_of(*trees: Expression) -> dict[Expression, Range]:
    """The least and the greatest value of each node that is an integer or a bool; what may wrap has its type's whole range."""
    found: dict[Expression, Range] = {}
    for node in nodes_of(*trees):
        if node.type is BOOL or node.type.is_integer:
            exact = exact_range(node, found)
            low, high = (0, 1) if node.type is BOOL else range_of_type(node.type)
            found[node] = exact if low <= exact[0] and exact[1] <= high else (low, high)
    return found


def exact_range(node: Expression, ranges: dict[Expression, Range]) -> Range:
    """The range of an integer or a bool if its operator did not wrap, given those of its operands."""
    if node.type is BOOL:
        return 0, 1
    whole = range_of_type(node.type)
    operands = [ranges.get(operand, whole) for operand in node.operands]
    match node.operation:
        case "input":
            return 0, INPUT_LIMITS[node.value] - 1
        case "constant":
            return node.value, node.value
        case "number":
            return -NUMBER_LIMIT, NUMBER_LIMIT
        case "load" if LOADED_AS[node.value.dtype] is INT32:
            return _LOADED.get(node.value.dtype, whole)
        case "add":
            return operands[0][0] + operands[1][0], operands[0][1] + operands[1][1]
        case "mul":
            products = [a * b for a in operands[0] for b in operands[1]]
            return min(products), max(products)
        case "neg":
            return -operands[0][1], -operands[0][0]
        case "abs":
            (low, high), least = operands[0], 0
            return max(low, -high, least), max(-low, high)
        case "sign":
            return -1, 1
        case "min" | "max":
            take = min if node.operation == "min" else max
            return take(operands[0][0], operands[1][0]), take(operands[0][1], operands[1][1])
        case "where":
            return min(operands[1][0], operands[2][0]), max(operands[1][1], operands[2][1])
        case "floor_div" if operands[1][0] > 0:
            quotients = [a // b for a in operands[0] for b in operands[1]]
            return min(quotients), max(quotients)
        case "mod" if operands[1][0] > 0:
            return 0, operands[1][1] - 1
        case "and" if min(operands[0][0], operands[1][0]) >= 0:
            return 0, min(operands[0][1], operands[1][1])
        case "shift_right" if operands[0][0] >= 0:
            return 0, operands[0][1]
        case "int32" | "int64" if node.operands[0] in ranges:
            return ranges[node.operands[0]]
    return whole
