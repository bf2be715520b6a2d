"""Forms of expressions for which kernels have faster ways: scores that are only added to, windows and causal masks."""

from __future__ import annotations

from dataclasses import dataclass

from .bounds import range_of_type, ranges_of
from .build import apply
from .linear import LinearForm, is_exact
from .tree import BOOL, FLOAT32, INT32, KEY, QUERY, SCORE, Expression, constant, depends_on

_DISTANCE = apply("add", QUERY, apply("neg", KEY))


def added_term(score: Expression) -> Expression | None:
    """g, if the tree is score + g and g does not depend on the score."""
    if score is SCORE:
        return constant(0.0, FLOAT32)
    scaled = scaled_and_added(score)
    return scaled[1] if scaled is not None and scaled[0].value == 1.0 else None


def scaled_and_added(score: Expression) -> tuple[Expression, Expression] | None:
    """(c, g), if the tree is score * c + g, c is a constant or a number, and g does not depend on the score."""
    one, zero = constant(1.0, FLOAT32), constant(0.0, FLOAT32)
    if score is SCORE:
        return one, zero
    if "score" not in depends_on(score):
        return None
    if score.operation == "add":
        for inner, other in (score.operands, score.operands[::-1]):
            if "score" not in depends_on(other):
                found = scaled_and_added(inner)
                return found and (found[0], apply("add", found[1], other))
    if score.operation == "neg":
        found = scaled_and_added(score.operands[0])
        if found is not None and found[0].operation == "constant":
            return apply("neg", found[0]), apply("neg", found[1])
    if score.operation in ("mul", "div") and score.operands[0] is SCORE and score.operands[1].operation in ("constant", "number"):
        by = score.operands[1]
        return (by if score.operation == "mul" else apply("div", one, by)), zero
    return None


@dataclass(frozen=True)
class VisibleWindow:
    """A query sees keys from query - left to query + right, both included, and of these those for which `rest` is true.

    left, right: int32 expressions of constants and numbers; None: no end. rest: None: all keys of the window.
    """

    left: Expression | None
    right: Expression | None
    rest: Expression | None = None

    @property
    def is_causal(self) -> bool:
        """Whether a query sees all keys up to its own position: a causal mask aligned top-left."""
        return self.left is None and self.rest is None and self.right is constant(0, INT32)


def visible_window(mask: Expression) -> VisibleWindow:
    """A mask as a window and the rest of its conditions. Positions count from 0: where len_q != len_kv, they are not aligned at the end."""
    ends: list[Expression | None] = [None, None]  # right, left
    rest = None
    conditions, stack = [], [mask]
    while stack:
        each = stack.pop()
        if each.operation == "and" and each.type is BOOL:
            stack.extend(each.operands)
        else:
            conditions.append(each)
    for condition in conditions:
        found = _window_ends(condition)
        if found is None:
            rest = condition if rest is None else apply("and", rest, condition)
            continue
        for side, end in enumerate(found):
            if end is not None:
                known = ends[side]
                ends[side] = end if known is None else _smaller(known, end)
    if rest is not None and rest is constant(True, BOOL):
        rest = None
    return VisibleWindow(ends[1], ends[0], rest)


def _smaller(a: Expression, b: Expression) -> Expression:
    return apply("min", a, b)


def _window_ends(condition: Expression) -> tuple[Expression | None, Expression | None] | None:
    """(right, left), if the condition says key - query <= right or query - key <= left."""
    if condition.operation not in ("le", "lt", "eq") or condition.operands[0].type is not INT32:
        return None
    low, high = condition.operands
    if low.operation == "abs" and condition.operation != "eq" and low.operands[0] in (_DISTANCE, apply("neg", _DISTANCE)):
        right = constant_beside(LinearForm.of((high, 1)), {}, int(condition.operation == "lt"))
        return None if right is None else (right, right)
    ranges = ranges_of(low, high)
    if not (is_exact(low, ranges) and is_exact(high, ranges)):
        return None
    form = LinearForm.of((high, 1), (low, -1))  # 0 <= form
    if condition.operation == "eq":
        ends = constant_beside(form, {QUERY: 1, KEY: -1}), constant_beside(form.negated(), {QUERY: -1, KEY: 1})
        if None in ends:
            ends = constant_beside(form.negated(), {QUERY: 1, KEY: -1}), constant_beside(form, {QUERY: -1, KEY: 1})
        return None if None in ends else ends
    strict = int(condition.operation == "lt")
    right, left = constant_beside(form, {QUERY: 1, KEY: -1}, strict), constant_beside(form, {QUERY: -1, KEY: 1}, strict)
    return None if right is None and left is None else (right, left)


def constant_beside(form: LinearForm, positions: dict[Expression, int], strict: int = 0) -> Expression | None:
    """What stands beside `positions` in a form, less `strict`, if it is of constants and numbers and cannot wrap."""
    others = tuple((term, by) for term, by in form.terms if term not in positions)
    found = {term: by for term, by in form.terms if term in positions}
    if found != positions or any(depends_on(term) or term.operation == "load" for term, _ in others):
        return None
    end = LinearForm(others, form.offset - strict)
    least, most = end.range(ranges_of(*(term for term, _ in others)))
    low, high = range_of_type(INT32)
    return end.expression(INT32) if low <= least and most <= high else None
