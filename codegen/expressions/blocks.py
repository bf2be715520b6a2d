"""What of an expression is the same in whole blocks of queries and keys, as of `query // 128`."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

from .tree import Expression, loads_of, nodes_of

AXES = ("query", "key")
_LEAVES = ("input", "number", "constant")
SMALLEST_BLOCK = 16
"""Multiples of it are sizes of blocks that a lane's fragment of scores knows where to find."""


class Blocks(NamedTuple):
    """In which blocks a value is the same: by what queries, or keys, are divided; one constant or number alone. None: for all of them.

    fine: whether there are no such blocks along an axis, or none that are known
    """

    divisor: Expression | None = None
    fine: bool = False


def blocks_of(tree: Expression, axis: str) -> dict[Expression, Blocks]:
    """Of each node. The value of `axis` // divisor is the same in blocks of that many."""
    found: dict[Expression, Blocks] = {}
    for node in nodes_of(tree):
        if node.operation == "input":
            found[node] = Blocks(fine=node.value == axis)
        elif node.operation == "floor_div" and _divides(node, axis):
            found[node] = Blocks(node.operands[1])
        else:
            each = {found[part] for part in node.operands} - {Blocks()}
            found[node] = Blocks() if not each else next(iter(each)) if len(each) == 1 else Blocks(fine=True)
    return found


def _divides(node: Expression, axis: str) -> bool:
    of, divisor = node.operands
    is_axis = of.operation == "input" and of.value == axis
    return is_axis and (divisor.operation == "number" or (divisor.operation == "constant" and divisor.value > 0))


def in_blocks(tree: Expression) -> bool:
    """Whether it asks for blocks of queries or keys."""
    return any(node.operation == "floor_div" and any(_divides(node, axis) for axis in AXES) for node in nodes_of(tree))


def loads_in_blocks(tree: Expression) -> bool:
    """Whether all that it loads is the same in whole blocks of queries and keys."""
    blocks = [blocks_of(tree, axis) for axis in AXES]
    return not any(of_axis[load].fine for load in loads_of(tree) for of_axis in blocks)


def divisors_of_positions(trees: Iterable[Expression]) -> list[str]:
    """The names of numbers by which queries or keys are divided."""
    divisions = (node for node in nodes_of(*trees) if node.operation == "floor_div" and any(_divides(node, axis) for axis in AXES))
    return [node.operands[1].value for node in divisions if node.operands[1].operation == "number"]


class BlockParts(NamedTuple):
    """The largest parts of an expression that are the same in blocks whose sizes the kernel's text knows.

    sizes: queries and keys of blocks in which all of them are the same; 0: any
    """

    parts: tuple[Expression, ...]
    sizes: tuple[int, int]


def block_parts(tree: Expression) -> BlockParts:
    """Leaves and their opposites are none of them, but loads are."""
    blocks = {axis: blocks_of(tree, axis) for axis in AXES}
    size_of = {node: [_size(blocks[axis][node]) for axis in AXES] for node in nodes_of(tree)}
    parts: list[Expression] = []
    stack, seen = [tree], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if None not in size_of[node]:
            if (node.operands[0] if node.operation == "neg" else node).operation not in _LEAVES:
                parts.append(node)
        else:
            stack.extend(node.operands)
    sizes = [gcd(*(size_of[node][i] or 0 for node in parts)) for i in range(len(AXES))]
    ordered = [node for node in nodes_of(tree) if node in parts]
    return BlockParts(tuple(ordered), (sizes[0], sizes[1]))


def _size(blocks: Blocks) -> int | None:
    """0: all of them are one. None: of no size that the text knows."""
    if blocks.fine:
        return None
    if blocks.divisor is None:
        return 0
    size = int(blocks.divisor.value) if blocks.divisor.operation == "constant" else 1
    return size if size % SMALLEST_BLOCK == 0 else None
