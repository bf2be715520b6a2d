"""`apply`: the one way to make a node that computes. It checks types, computes what is constant and brings what is left into one form.

Each rule keeps the value exactly, whatever NaN and infinities there are, but for the sign of a zero. Floating-point sums and products are
not reassociated. Equal functions that are written in other ways often become one tree, so one text and one kernel, but need not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .bounds import range_of_type, ranges_of
from .linear import LinearForm, compared
from .operators import OPERATORS, of_constants, result_type
from .tree import BOOL, FLOAT32, Expression, ScalarType, constant, node, to_float32


def apply(name: str, *operands: Expression) -> Expression:
    """An operator's value in its simplest form. Raises ArgumentError as `result_type` does."""
    type = result_type(name, [operand.type for operand in operands])
    if all(operand.operation == "constant" for operand in operands):
        value = of_constants(name, type, [operand.value for operand in operands])
        if value is not None:
            return constant(value, type)
    rule = _RULES.get(name)
    simpler = None if rule is None else rule(type, *operands)
    if simpler is not None:
        return simpler
    if OPERATORS[name].commutative:
        operands = tuple(sorted(operands, key=lambda each: each.sort_key))
    return node(name, type, operands)


def cast(tree: Expression, type: ScalarType) -> Expression:
    """The value in another type: a float is cut to an integer, and what is not 0 is true."""
    if tree.type is type:
        return tree
    return apply("ne", tree, constant(0, tree.type)) if type is BOOL else apply(type.value, tree)


def negative(tree: Expression) -> Expression:
    """-tree."""
    return apply("neg", tree)


def less(a: Expression, b: Expression) -> Expression:
    """The difference a - b."""
    return apply("add", a, negative(b))


def _value(tree: Expression) -> bool | int | float | None:
    """Of a constant; None of what is none."""
    return tree.value if tree.operation == "constant" else None


def _negated(tree: Expression) -> Expression | None:
    """x, if the tree is -x."""
    if tree.operation == "neg":
        return tree.operands[0]
    value = _value(tree)
    return None if value is None or not value < 0 else negative(tree)


def _chain(name: str, type: ScalarType, parts: list[Expression]) -> Expression:
    parts = sorted(parts, key=lambda each: each.sort_key)
    whole = parts[0]
    for part in parts[1:]:
        whole = node(name, type, (whole, part))
    return whole


def _parts(name: str, *operands: Expression) -> list[Expression]:
    """The operands of a chain of one associative operator."""
    found, stack = [], list(operands)
    while stack:
        each = stack.pop()
        if each.operation == name:
            stack.extend(each.operands)
        else:
            found.append(each)
    return found


def _add(type: ScalarType, a: Expression, b: Expression) -> Expression | None:
    if type is not FLOAT32:
        return LinearForm.of((a, 1), (b, 1)).expression(type)
    for one, other in ((a, b), (b, a)):
        if _value(one) == 0:
            return other
    if a.operation == b.operation == "neg":
        return negative(apply("add", a.operands[0], b.operands[0]))
    return None


def _mul(type: ScalarType, a: Expression, b: Expression) -> Expression | None:
    if type is not FLOAT32:
        factor, others, stack = 1, [], [a, b]
        while stack:
            part = stack.pop()
            if part.operation == "neg":
                factor = -factor
            if part.operation in ("neg", "mul"):
                stack.extend(part.operands)
            elif part.operation == "constant":
                factor *= part.value
            else:
                others.append(part)
        return LinearForm.of((_chain("mul", type, others), factor)).expression(type)
    for one, other in ((a, b), (b, a)):
        if _value(one) == 1:
            return other
        opposite = _negated(one)
        if opposite is not None:
            return negative(apply("mul", opposite, other))
    return None


def _neg(type: ScalarType, a: Expression) -> Expression | None:
    if a.operation == "neg":
        return a.operands[0]
    if type is not FLOAT32:
        return LinearForm.of((a, -1)).expression(type)
    if a.operation == "add":
        first, second = a.operands
        if second.operation == "neg" or _value(second) is not None:
            return apply("add", negative(first), negative(second))
    return None


def _div(type: ScalarType, a: Expression, b: Expression) -> Expression | None:
    for one, opposite in ((a, _negated(a)), (b, _negated(b))):
        if opposite is not None:
            return negative(apply("div", opposite, b) if one is a else apply("div", a, opposite))
    value = _value(b)
    if value and math.isfinite(value) and math.frexp(value)[0] == 0.5 and math.isfinite(to_float32(1 / value)):
        return apply("mul", a, constant(1 / value, type))  # by a power of two: exact
    return None


def _floor_div(type: ScalarType, a: Expression, b: Expression) -> Expression | None:
    return a if type is not FLOAT32 and _value(b) == 1 else None


def _mod(type: ScalarType, a: Expression, b: Expression) -> Expression | None:
    return constant(0, type) if type is not FLOAT32 and _value(b) in (1, -1) else None


def _same(type: ScalarType, a: Expression, b: Expression) -> Expression | None:
    return a if a is b else None


def _abs(type: ScalarType, a: Expression) -> Expression | None:
    if a.operation in ("abs", "sigmoid", "exp", "exp2"):
        return a
    if a.operation == "neg":
        return apply("abs", a.operands[0])
    if type is not FLOAT32:
        return a if ranges_of(a)[a][0] >= 0 else None
    if a.operation == "float32":
        inner = a.operands[0]
        return a if inner.type is BOOL else cast(apply("abs", inner), FLOAT32) if _has_opposite(inner) else None
    return None


def _has_opposite(tree: Expression) -> bool:
    """Whether -x is exact: of all integers but the least one."""
    return tree.type is FLOAT32 or ranges_of(tree)[tree][0] > range_of_type(tree.type)[0]


def _comparison(name: str) -> Callable[..., Expression | None]:
    def rule(type: ScalarType, a: Expression, b: Expression) -> Expression | None:
        if a.type.is_integer:
            return compared(name, a, b) or (constant(name in ("eq", "le"), BOOL) if a is b else None)
        if a.type is BOOL:
            return _compared_bools(name, a, b)
        opposites = _negated(a), _negated(b)
        if opposites[0] is not None and (opposites[1] is not None or _value(b) is not None):
            return apply(name, negative(b), opposites[0])
        if opposites[1] is not None and b.operation == "neg" and _value(a) is not None:
            return apply(name, opposites[1], negative(a))
        return None

    return rule


def _compared_bools(name: str, a: Expression, b: Expression) -> Expression:
    if a is b:
        return constant(name == "eq", BOOL)
    different = apply("xor", a, b)
    return different if name == "ne" else apply("not", different)


def _all_or_any(name: str) -> Callable[..., Expression | None]:
    def rule(type: ScalarType, a: Expression, b: Expression) -> Expression | None:
        neutral, deciding = ((True, False) if type is BOOL else (-1, 0)) if name == "and" else ((False, True) if type is BOOL else (0, -1))
        parts = {part for part in _parts(name, a, b) if _value(part) != neutral}
        if any(_value(part) == deciding for part in parts):
            return constant(deciding, type)
        return _chain(name, type, list(parts)) if parts else constant(neutral, type)

    return rule


def _xor(type: ScalarType, a: Expression, b: Expression) -> Expression | None:
    if a is b:
        return constant(0, type)
    for one, other in ((a, b), (b, a)):
        if _value(one) in (0, -1, True):
            if not _value(one):
                return other
            if type is BOOL or _value(one) == -1:
                return apply("not", other)
    return None


def _not(type: ScalarType, a: Expression) -> Expression | None:
    match a.operation:
        case "not":
            return a.operands[0]
        case "eq":
            return apply("ne", *a.operands)
        case "ne":
            return apply("eq", *a.operands)
        case "le" | "lt" if a.operands[0].type is not FLOAT32:
            return apply("lt" if a.operation == "le" else "le", a.operands[1], a.operands[0])
    return None


def _where(type: ScalarType, condition: Expression, a: Expression, b: Expression) -> Expression | None:
    if a is b or _value(condition) is True:
        return a
    if _value(condition) is False:
        return b
    if condition.operation == "not":
        return apply("where", condition.operands[0], b, a)
    if condition.operation in ("eq", "ne", "le", "lt") and (condition.operands[0].type is not FLOAT32 or condition.operation == "ne"):
        opposite = apply("not", condition)
        if (opposite.operation, opposite.sort_key) < (condition.operation, condition.sort_key):
            return apply("where", opposite, b, a)
    if type is BOOL:
        both = apply("and", condition, a), apply("and", apply("not", condition), b)
        return apply("or", *both) if _value(a) is not None or _value(b) is not None else None
    return None


def _shift(type: ScalarType, a: Expression, by: Expression) -> Expression | None:
    return a if _value(by) == 0 else None


def _pow(type: ScalarType, a: Expression, b: Expression) -> Expression | None:
    if _value(a) == 2:
        return apply("exp2", b)
    exponent, one = _value(b), constant(1.0, type)
    if exponent in (2, 3, -2):
        square = apply("mul", a, a)
        return square if exponent == 2 else apply("mul", square, a) if exponent == 3 else apply("div", one, square)
    if exponent in (0.5, -0.5):
        return apply("sqrt" if exponent > 0 else "rsqrt", a)
    if exponent in (0, 1):
        return a if exponent == 1 else one
    return apply("div", one, a) if exponent == -1 else None


def _whole(type: ScalarType, a: Expression) -> Expression | None:
    return a if a.operation in ("float32", "floor", "ceil", "round", "trunc") else None


def _cast(name: str) -> Callable[..., Expression | None]:
    def rule(type: ScalarType, a: Expression) -> Expression | None:
        if a.operation == "neg" and a.type is not FLOAT32 and _has_opposite(a.operands[0]) and name != "int32":
            return negative(cast(a.operands[0], type))
        if a.operation in ("int32", "int64") and a.operands[0].type is not FLOAT32:
            inner = a.operands[0]
            if inner.type is BOOL or a.type.value == "int64":
                return cast(inner, type)
        return None

    return rule


_RULES: dict[str, Callable[..., Expression | None]] = {
    **{"add": _add, "mul": _mul, "neg": _neg, "div": _div, "floor_div": _floor_div, "mod": _mod, "pow": _pow, "abs": _abs},
    **{"min": _same, "max": _same, "not": _not, "xor": _xor, "where": _where},
    **{name: _all_or_any(name) for name in ("and", "or")},
    **{name: _comparison(name) for name in ("eq", "ne", "lt", "le")},
    **dict.fromkeys(("shift_left", "shift_right"), _shift),
    **dict.fromkeys(("floor", "ceil", "round", "trunc"), _whole),
    **{name: _cast(name) for name in ("int32", "int64", "float32")},
}
