"""Integers as sums: coefficients of terms and a constant. By them sums and comparisons that say the same become the same tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .bounds import Range, exact_range, range_of_type, ranges_of
from .operators import converted
from .tree import BOOL, Expression, ScalarType, constant, node


@dataclass(frozen=True)
class LinearForm:
    """sum of coefficient * term, plus `offset`. No coefficient is 0, and terms are in the order of their sort keys."""

    terms: tuple[tuple[Expression, int], ...]
    offset: int

    @classmethod
    def of(cls, *parts: tuple[Expression, int]) -> LinearForm:
        """Of the sum of factor * expression, all of integers of one type."""
        coefficients: dict[Expression, int] = {}
        offset, stack = 0, list(parts)
        while stack:
            each, factor = stack.pop()
            match each.operation, each.operands:
                case "constant", _:
                    offset += factor * each.value
                case "add", operands:
                    stack.extend((operand, factor) for operand in operands)
                case "neg", (operand,):
                    stack.append((operand, -factor))
                case "mul", (operand, Expression(operation="constant", value=by)):
                    stack.append((operand, factor * by))
                case _:
                    coefficients[each] = coefficients.get(each, 0) + factor
        kept = ((term, coefficient) for term, coefficient in coefficients.items() if coefficient)
        return cls(tuple(sorted(kept, key=lambda pair: pair[0].sort_key)), offset)

    def negated(self) -> LinearForm:
        """Times -1."""
        return LinearForm(tuple((term, -coefficient) for term, coefficient in self.terms), -self.offset)

    def range(self, ranges: dict[Expression, Range]) -> Range:
        """Its least and its greatest value, as whole numbers that do not wrap."""
        low = high = self.offset
        for term, coefficient in self.terms:
            ends = [coefficient * end for end in ranges[term]]
            low, high = low + min(ends), high + max(ends)
        return low, high

    def expression(self, type: ScalarType) -> Expression:
        """As a tree, modulo 2 to the bits of its type. Its first term is positive: the sign of one that is not stands before the sum."""
        reduced = [(term, converted(coefficient, type)) for term, coefficient in self.terms]
        kept = LinearForm(tuple((term, coefficient) for term, coefficient in reduced if coefficient), converted(self.offset, type))
        if kept.terms and kept.terms[0][1] < 0 and kept.terms[0][1] != range_of_type(type)[0]:
            return node("neg", type, (kept.negated().expression(type),))
        parts = [_multiple(term, coefficient, type) for term, coefficient in kept.terms]
        if kept.offset or not parts:
            parts.append(constant(kept.offset, type))
        whole = parts[0]
        for part in parts[1:]:
            whole = node("add", type, (whole, part))
        return whole


def _multiple(term: Expression, coefficient: int, type: ScalarType) -> Expression:
    size = converted(abs(coefficient), type)
    multiple = term if size == 1 else node("mul", type, (term, constant(size, type)))
    return multiple if coefficient > 0 or size < 0 else node("neg", type, (multiple,))


def is_exact(tree: Expression, ranges: dict[Expression, Range]) -> bool:
    """Whether none of the additions and products that a linear form looks through can wrap."""
    stack = [tree]
    while stack:
        each = stack.pop()
        if each.operation in ("add", "neg", "mul"):
            low, high = range_of_type(each.type)
            exact = exact_range(each, ranges)
            if exact[0] < low or exact[1] > high:
                return False
            stack.extend(each.operands)
    return True


def compared(name: str, a: Expression, b: Expression) -> Expression | None:
    """`a name b` of integers in the one form that all equal comparisons have; None where arithmetic might wrap.

    What is added stands on one side and what is subtracted on the other: `q - k >= 0` and `k <= q` are one text.
    """
    type, ranges = a.type, ranges_of(a, b)
    if not (is_exact(a, ranges) and is_exact(b, ranges)):
        return None
    form = LinearForm.of((a, 1), (b, -1))  # form name 0
    if name in ("eq", "ne") and form.terms and form.terms[0][1] < 0:
        form = form.negated()
    if name == "lt":
        name, form = "le", LinearForm(form.terms, form.offset + 1)
    if not form.terms:
        return constant({"eq": form.offset == 0, "ne": form.offset != 0, "le": form.offset <= 0}[name], BOOL)
    left, right = _side(form.terms, 1), LinearForm(_side(form.terms, -1), -form.offset)
    if not left:
        sides = LinearForm((), form.offset), LinearForm(right.terms, 0)
    elif name == "le" and right.terms and form.offset == 1:
        name, sides = "lt", (LinearForm(left, 0), LinearForm(right.terms, 0))
    else:
        sides = LinearForm(left, 0), right
    low, high = range_of_type(type)
    for side in sides:
        least, most = side.range(ranges)
        if least < low or most > high:
            return None
    first, second = (side.expression(type) for side in sides)
    if name in ("eq", "ne"):
        first, second = sorted((first, second), key=lambda each: each.sort_key)
    return node(name, BOOL, (first, second))


def _side(terms: Iterable[tuple[Expression, int]], sign: int) -> tuple[tuple[Expression, int], ...]:
    return tuple((term, coefficient * sign) for term, coefficient in terms if coefficient * sign > 0)
