"""The operators of expressions: how many operands, of which types, and what constants come of constants.

Their meaning is that of PyTorch's functions on tensors of these types: `//` rounds down, `%` takes the divisor's sign, integers wrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.errors import ArgumentError, choice_error

from .tree import BITS, BOOL, FLOAT32, INT32, INT64, ScalarType, to_float32

_NUMBERS, _INTEGERS, _FLOATS = (INT32, INT64, FLOAT32), (INT32, INT64), (FLOAT32,)
_BITWISE = (BOOL, INT32, INT64)
_ANY = (BOOL, INT32, INT64, FLOAT32)


@dataclass(frozen=True)
class Operator:
    """An operator.

    types:       what its operands may be; all of them are of one type (of `where`, all but the first, a bool)
    result:      the type of its value; None: that of its operands
    arity:       how many operands it has
    commutative: whether the order of two operands says nothing
    of_numbers:  what it makes of constants, in float64 or whole numbers, rounded afterwards; None where a constant is left to the kernel
    """

    types: tuple[ScalarType, ...]
    result: ScalarType | None = None
    arity: int = 1
    commutative: bool = False
    of_numbers: Callable[..., Any] | None = None


def divide(a: float, b: float) -> float:
    """IEEE's quotient."""
    if b != 0:
        return a / b
    return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)


def smaller(a: float, b: float) -> float:
    """The minimum, and NaN where one of them is."""
    return a if a < b or a != a else b


def larger(a: float, b: float) -> float:
    """The maximum, and NaN where one of them is."""
    return a if a > b or a != a else b


def shift_left(a: int, by: int) -> int:
    """As PyTorch shifts: by a negative number, or more than there are bits, gives 0."""
    return a << by if 0 <= by < 64 else 0


def shift_right(a: int, by: int) -> int:
    """As PyTorch shifts, with the sign's bit."""
    return a >> by if 0 <= by < 64 else -(a < 0)


def _arithmetic(types: tuple[ScalarType, ...], of_numbers: Callable[..., Any] | None, commutative: bool = False) -> Operator:
    return Operator(types, None, 2, commutative, of_numbers)


def _comparison(types: tuple[ScalarType, ...], of_numbers: Callable[..., Any], commutative: bool = False) -> Operator:
    return Operator(types, BOOL, 2, commutative, of_numbers)


_FUNCTIONS = ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf")
OPERATORS: dict[str, Operator] = {
    "add": _arithmetic(_NUMBERS, lambda a, b: a + b, True),
    "mul": _arithmetic(_NUMBERS, lambda a, b: a * b, True),
    "div": _arithmetic(_FLOATS, divide),
    "floor_div": _arithmetic(_NUMBERS, None),
    "mod": _arithmetic(_NUMBERS, None),
    "min": _arithmetic(_NUMBERS, smaller, True),
    "max": _arithmetic(_NUMBERS, larger, True),
    "pow": _arithmetic(_FLOATS, None),  # one of both is a constant
    "neg": Operator(_NUMBERS, of_numbers=lambda a: -a),
    "abs": Operator(_NUMBERS, of_numbers=abs),
    "sign": Operator(_NUMBERS, of_numbers=lambda a: (a > 0) - (a < 0)),
    **{name: Operator(_FLOATS) for name in (*_FUNCTIONS, "floor", "ceil", "round", "trunc")},
    "eq": _comparison(_ANY, lambda a, b: a == b, True),
    "ne": _comparison(_ANY, lambda a, b: a != b, True),
    "lt": _comparison(_NUMBERS, lambda a, b: a < b),
    "le": _comparison(_NUMBERS, lambda a, b: a <= b),
    "and": _arithmetic(_BITWISE, lambda a, b: a & b, True),
    "or": _arithmetic(_BITWISE, lambda a, b: a | b, True),
    "xor": _arithmetic(_BITWISE, lambda a, b: a ^ b, True),
    "not": Operator(_BITWISE, of_numbers=lambda a: not a if isinstance(a, bool) else ~a),
    "shift_left": _arithmetic(_INTEGERS, shift_left),
    "shift_right": _arithmetic(_INTEGERS, shift_right),
    "where": Operator(_ANY, None, 3, of_numbers=lambda condition, a, b: a if condition else b),
    "int32": Operator((BOOL, INT64, FLOAT32), INT32),
    "int64": Operator((BOOL, INT32, FLOAT32), INT64),
    "float32": Operator((BOOL, INT32, INT64), FLOAT32),
}


def result_type(name: str, types: Sequence[ScalarType]) -> ScalarType:
    """The type of an operator's value. Raises ArgumentError for an unknown operator, and for operands that it does not take."""
    if name not in OPERATORS:
        raise choice_error("operator", name, OPERATORS)
    operator = OPERATORS[name]
    if len(types) != operator.arity:
        raise ArgumentError(f"operands of {name} must be {operator.arity}; got {len(types)}")
    alike = types[1:] if name == "where" else types
    if alike[0] not in operator.types or len(set(alike)) > 1 or (name == "where" and types[0] is not BOOL):
        allowed = " or ".join(operator.types)
        raise ArgumentError(f"operands of {name} must be of one type, {allowed}; got {', '.join(types)}")
    return operator.result or alike[0]


def converted(value: Any, type: ScalarType) -> Any:
    """A value of a type: floats are rounded to fp32, integers wrap. None where a float has no such integer."""
    if type is BOOL:
        return bool(value)
    if type is FLOAT32:
        return to_float32(value)
    if isinstance(value, float):
        if not math.isfinite(value) or not -(2 ** (BITS[type] - 1)) <= math.trunc(value) < 2 ** (BITS[type] - 1):
            return None
        return math.trunc(value)
    half = 2 ** (BITS[type] - 1)
    return (int(value) + half) % (2 * half) - half


def of_constants(name: str, type: ScalarType, values: Sequence[Any]) -> Any:
    """The constant that an operator of a value of `type` makes of constants; None where it is left to the kernel."""
    if name in ("int32", "int64", "float32"):
        return converted(values[0], type)
    if name in ("floor_div", "mod"):
        if type is FLOAT32 or values[1] == 0:
            return None
        return converted(values[0] // values[1] if name == "floor_div" else values[0] % values[1], type)
    if name.startswith("shift") and type is INT32 and not 0 <= values[1] < 32:
        return 0 if name == "shift_left" else -(values[0] < 0)
    of_numbers = OPERATORS[name].of_numbers
    return None if of_numbers is None else converted(of_numbers(*values), type)
