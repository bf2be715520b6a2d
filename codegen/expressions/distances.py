"""Which expressions know of positions no more than how far the key is from the query, and which elements these read one after the other."""

from __future__ import annotations

from typing import NamedTuple

from .bounds import INPUT_LIMITS, Range, range_of_type, ranges_of
from .linear import LinearForm, is_exact
from .tree import INT32, KEY, QUERY, Expression, constant, dependences, loads_of, node

_POSITIONS = frozenset((QUERY.value, KEY.value))
_COMPARISONS = ("le", "lt", "eq", "ne")
_FARTHEST = max(INPUT_LIMITS[name] for name in _POSITIONS)


class Line(NamedTuple):
    """A load whose index along one dimension is sign * (query - key) + rest, and nothing else in it depends on positions.

    sign: 1 or -1
    """

    dimension: int
    sign: int
    rest: Expression

    def at(self, load: Expression, distance: Expression) -> tuple[Expression, ...]:
        """The indices of the load for a distance, an integer, in place of query - key."""
        moved = distance if self.sign > 0 else node("neg", INT32, (distance,))
        index = moved if self.rest is constant(0, INT32) else node("add", INT32, (self.rest, moved))
        return (*load.operands[: self.dimension], index, *load.operands[self.dimension + 1 :])


def is_of_distance(tree: Expression) -> bool:
    """Whether the tree depends on query - key, and beyond that neither on the query nor on the key: proved by its form."""
    depends, ranges = dependences(tree), ranges_of(tree)
    if not _POSITIONS & depends[tree]:
        return False
    stack, seen = [tree], set()
    while stack:
        each = stack.pop()
        if each in seen or not _POSITIONS & depends[each]:
            continue
        seen.add(each)
        if each in (QUERY, KEY):
            return False
        parts = each.operands
        form = _form(each, ranges)
        if form is not None and tuple(term for term, _ in form.terms) != (each,):
            balanced = _of(form, QUERY) == -_of(form, KEY)
            parts = tuple(term for term, _ in form.terms if not (balanced and term in (QUERY, KEY)))
        stack.extend(parts)
    return True


def lines_of(tree: Expression) -> dict[Expression, Line]:
    """The loads of a tree that read one element after the other from one distance to the next."""
    found = {load: _line(load) for load in loads_of(tree)}
    return {load: line for load, line in found.items() if line is not None}


def _line(load: Expression) -> Line | None:
    depends = dependences(load)
    moving = [i for i, index in enumerate(load.operands) if _POSITIONS & depends[index]]
    if len(moving) != 1:
        return None
    index = load.operands[moving[0]]
    if index.operation == "int64" and index.operands[0].type is INT32:
        index = index.operands[0]  # the same number
    ranges = ranges_of(index)
    if index.type is not INT32 or not is_exact(index, ranges):
        return None
    form = LinearForm.of((index, 1))
    sign = _of(form, QUERY)
    rest = LinearForm(tuple((term, by) for term, by in form.terms if term not in (QUERY, KEY)), form.offset)
    if sign not in (1, -1) or _of(form, KEY) != -sign or any(_POSITIONS & depends[term] for term, _ in rest.terms):
        return None
    (low, high), (least, most) = range_of_type(INT32), rest.range(ranges)
    return Line(moving[0], sign, rest.expression(INT32)) if low <= least - _FARTHEST and most + _FARTHEST <= high else None


def _form(tree: Expression, ranges: dict[Expression, Range]) -> LinearForm | None:
    """Of an integer, modulo 2^32 as its value is, or of the difference that a comparison is decided by."""
    if tree.type is INT32:
        return LinearForm.of((tree, 1))
    if tree.operation in _COMPARISONS and all(side.type is INT32 and is_exact(side, ranges) for side in tree.operands):
        return LinearForm.of((tree.operands[0], 1), (tree.operands[1], -1))
    return None


def _of(form: LinearForm, position: Expression) -> int:
    return dict(form.terms).get(position, 0)
