"""Derivatives: of an expression by the score, or by an element of a captured tensor.

They are PyTorch's but where a function has none: at 0 that of abs is 0; where `min` and `max` of two values tie, each gets half, as of
torch.maximum, but all of it where the other one is a constant or a number, as of torch.clamp (and not 0, as of relu). Comparisons, what
rounds and what is an integer have the derivative 0, and a branch that `where` does not take adds nothing, not even where it is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flashgen.codegen.errors import ArgumentError

from .build import apply, less, negative
from .tree import FLOAT32, Expression, constant, nodes_of

_ZERO, _ONE, _HALF = (constant(value, FLOAT32) for value in (0.0, 1.0, 0.5))
_LEAST = 2.0**-60  # constants that are multiplied with each other beforehand are not smaller


def derivative(tree: Expression, by: Expression) -> Expression:
    """The derivative d tree / d by, an fp32 expression that shares its parts with the tree.

    by: SCORE, or a load of a floating-point tensor

    All loads of the same element are one node. Raises ArgumentError where one of both is not fp32, or `by` is neither score nor load.
    """
    for name, given in (("tree", tree), ("by", by)):
        if given.type is not FLOAT32:
            raise ArgumentError(f"{name} must be float32 to have a derivative; got {given.type}")
    if by.operation not in ("input", "load"):
        raise ArgumentError(f"by must be the score or a load; got {by.operation}")
    found: dict[Expression, Expression] = {}
    for node in nodes_of(tree):
        if node is by:
            found[node] = _ONE
        elif node.type is FLOAT32 and any(found[operand] is not _ZERO for operand in node.operands):
            rule = _RULES.get(node.operation)
            found[node] = _ZERO if rule is None else rule(node, *node.operands, *(found[operand] for operand in node.operands))
        else:
            found[node] = _ZERO
    return found[tree]


def _times(factor: Expression, tangent: Expression) -> Expression:
    if tangent is _ZERO:
        return _ZERO
    if factor.operation == "constant" and tangent.operation == "mul" and tangent.operands[1].operation == "constant":
        product = apply("mul", factor, tangent.operands[1])
        if _LEAST < abs(product.value) < 1 / _LEAST:
            return apply("mul", tangent.operands[0], product)
    return apply("mul", factor, tangent)


def _div(node: Expression, a: Expression, b: Expression, da: Expression, db: Expression) -> Expression:
    top = da if db is _ZERO else less(da, _times(node, db))
    return apply("div", top, b)


def _min_max(node: Expression, a: Expression, b: Expression, da: Expression, db: Expression) -> Expression:
    first, second = (a, b) if node.operation == "max" else (b, a)  # a is taken where first > second
    for one, other, tangent, takes in ((a, b, da, (second, first)), (b, a, db, (first, second))):
        if other.operation in ("constant", "number"):
            return apply("where", apply("le", *takes), tangent, _ZERO) if one is not other else _ZERO
    tie = apply("mul", _HALF, apply("add", da, db))
    return apply("where", apply("lt", second, first), da, apply("where", apply("lt", first, second), db, tie))


def _pow(node: Expression, a: Expression, b: Expression, da: Expression, db: Expression) -> Expression:
    if b.operation == "constant":
        return _times(apply("mul", b, apply("pow", a, constant(b.value - 1, FLOAT32))), da)
    if a.operation != "constant":
        raise ArgumentError("pow must have a constant base or exponent")
    return _times(apply("mul", constant(math.log(a.value) if a.value > 0 else math.nan, FLOAT32), node), db)


def _of_one(factor: Callable[[Expression, Expression], Expression]) -> Callable[..., Expression]:
    """The rule of a function of one operand, given its derivative by value and operand."""
    return lambda node, a, da: _times(factor(node, a), da)


_RULES: dict[str, Callable[..., Expression]] = {
    "add": lambda node, a, b, da, db: apply("add", da, db),
    "neg": lambda node, a, da: negative(da),
    "mul": lambda node, a, b, da, db: apply("add", _times(b, da), _times(a, db)),
    "div": _div,
    "mod": lambda node, a, b, da, db: less(da, _times(apply("floor_div", a, b), db)),
    "min": _min_max,
    "max": _min_max,
    "pow": _pow,
    "where": lambda node, condition, a, b, _, da, db: apply("where", condition, da, db),
    "abs": _of_one(lambda y, x: apply("sign", x)),
    "exp": _of_one(lambda y, x: y),
    "exp2": _of_one(lambda y, x: apply("mul", constant(math.log(2), FLOAT32), y)),
    "expm1": _of_one(lambda y, x: apply("add", y, _ONE)),
    "log": _of_one(lambda y, x: apply("div", _ONE, x)),
    "log2": _of_one(lambda y, x: apply("div", constant(1 / math.log(2), FLOAT32), x)),
    "log1p": _of_one(lambda y, x: apply("div", _ONE, apply("add", x, _ONE))),
    "sqrt": _of_one(lambda y, x: apply("div", _HALF, y)),
    "rsqrt": _of_one(lambda y, x: apply("div", negative(apply("mul", _HALF, y)), x)),
    "tanh": _of_one(lambda y, x: less(_ONE, apply("mul", y, y))),
    "sigmoid": _of_one(lambda y, x: apply("mul", y, less(_ONE, y))),
    "sin": _of_one(lambda y, x: apply("cos", x)),
    "cos": _of_one(lambda y, x: negative(apply("sin", x))),
    "erf": _of_one(lambda y, x: apply("mul", constant(2 / math.sqrt(math.pi), FLOAT32), apply("exp", negative(apply("mul", x, x))))),
}
