"""C++ that finds how much of a tile of scores a condition lets queries see, without a look at each of them.

`and`, `or` and `not` are known by their parts; a comparison of what depends on the query with what depends on the key by the lowest and the
highest of both sides; what is the same in whole blocks of queries and keys, as of `query // 128`, by one look at each block. All else is
unknown, and so may be what it is a part of.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from .blocks import AXES, Blocks, blocks_of
from .cxx import printed
from .tree import BOOL, Expression, dependences

_COMPARISONS = {"le": "is_at_most", "lt": "is_below", "eq": "is_equal", "ne": "is_equal"}
_MOST_LOOKS = 256  # in a tile of 128 x 128 that are worth while
_TILE = 128
_WHOLE = "kWholeTile"  # C++: a block that no tile is larger than


class TileLogic(NamedTuple):
    """C++ of a condition. statements: constants, each a line; result: a SeenInTile; is_known: whether it asks all of the condition."""

    statements: tuple[str, ...]
    result: str
    is_known: bool


def tile_logic(condition: Expression) -> TileLogic:
    """Of a mask_mod, for templates/tile/common/seen_tiles.cuh: within a function that has batch, head and tile."""
    return _Writer(condition).logic()


class _Writer:
    def __init__(self, condition: Expression) -> None:
        self._condition = condition
        self._depends = dependences(condition)
        self._blocks = {axis: blocks_of(condition, axis) for axis in AXES}
        self._statements: list[str] = []
        self._numbers = count()
        self._is_known = True

    def logic(self) -> TileLogic:
        result = self._seen(self._condition)
        return TileLogic(tuple(self._statements), result, self._is_known)

    def _seen(self, node: Expression) -> str:
        blocks = [self._blocks[axis][node] for axis in AXES]
        if self._looks(blocks) <= _MOST_LOOKS:
            sizes = ", ".join(_block(own) for own in blocks)
            return self._named("SeenInTile", f"seen_blocks(tile, {sizes}, {_lambda('int query, int key', 'bool', node)})")
        parts = node.operands
        if node.type is BOOL and node.operation in ("and", "or") and all(part.type is BOOL for part in parts):
            name = "both" if node.operation == "and" else "either"
            return f"{name}({', '.join(self._seen(part) for part in parts)})"
        if node.operation == "not":
            return f"opposite({self._seen(parts[0])})"
        if node.operation in _COMPARISONS and all(part.type.is_integer for part in parts):
            axes = [self._depends[part] & {*AXES} for part in parts]
            if {frozenset(("query",)), frozenset(("key",))} == {*axes}:
                sides = (self._range(part, "query" if "query" in own else "key") for part, own in zip(parts, axes, strict=True))
                compared = f"{_COMPARISONS[node.operation]}({', '.join(sides)})"
                return f"opposite({compared})" if node.operation == "ne" else compared
        self._is_known = False
        return "kUnknown"

    def _range(self, node: Expression, axis: str) -> str:
        value = _lambda(f"int {axis}", "i64", node)
        return self._named("ValueRange", f"range_over(tile.first_{axis}, tile.end_{axis}, {value})")

    def _named(self, kind: str, value: str) -> str:
        name = f"part{next(self._numbers)}"
        self._statements.append(f"const {kind} {name} = {value};")
        return name

    @staticmethod
    def _looks(blocks: list[Blocks]) -> int:
        """In a tile; those of a number that only a launch knows count as few."""
        found = 1
        for own in blocks:
            divisor = own.divisor
            size = 1 if own.fine else _TILE if divisor is None or divisor.operation != "constant" else int(divisor.value)
            found *= -(-_TILE // size)
        return found


def _block(blocks: Blocks) -> str:
    if blocks.fine:
        return "1"
    return _WHOLE if blocks.divisor is None else f"block_of({printed([blocks.divisor]).results[0]})"


def _lambda(parameters: str, result: str, node: Expression) -> str:
    body = printed([node])
    return f"[&]({parameters}) -> {result} {{ {' '.join((*body.statements, f'return {body.results[0]};'))} }}"
