"""`CapturedNumber`: stands for a Python number that a traced function captures, and is read anew on each call.

Arithmetic on it and other numbers is Python's own, done again on each call: a formula. What needs to know the number (a branch, `range`,
`math.sqrt`) makes it a constant of the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from .refusal import Restart

Formula = tuple[Any, ...]
"""("slot", i): the value that the trace has read in slot i. ("constant", value). (function, formula, ...)."""


class KnowsSlots(Protocol):
    """What takes down which captured numbers are constants."""

    def make_constant(self, slots: set[int]) -> None:
        """The numbers in these slots are constants from the next trace on."""


def value_of(formula: Formula, slots: Sequence[Any]) -> Any:
    """The number that a formula gives."""
    head, *rest = formula
    if head == "slot":
        return slots[rest[0]]
    return rest[0] if head == "constant" else head(*(value_of(each, slots) for each in rest))


def slots_of(formula: Formula) -> set[int]:
    """The slots that a formula reads."""
    head, *rest = formula
    if head == "slot":
        return {rest[0]}
    return set() if head == "constant" else set().union(*map(slots_of, rest))


class CapturedNumber:
    """See the module's docstring. `value`: the number as it is during the trace."""

    def __init__(self, captures: KnowsSlots, formula: Formula, value: Any) -> None:
        vars(self).update(_captures=captures, _formula=formula, _value=value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(n, int) says what it says of the number
        return type(vars(self)["_value"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """PyTorch takes it for an argument because it has this; while there is a trace, that is asked instead."""
        raise TypeError(f"{func} got a number that stands for another one in a trace")

    def __getattr__(self, name: str) -> Any:
        _need(self)

    def __setattr__(self, name: str, value: object) -> None:
        _need(self)


def parts_of(number: CapturedNumber) -> tuple[Formula, Any]:
    """(formula, value)."""
    fields = vars(number)
    return fields["_formula"], fields["_value"]


def is_captured(value: object) -> bool:
    """Whether a value is a CapturedNumber, which isinstance does not tell."""
    return type(value) is CapturedNumber


def _need(number: CapturedNumber, *others: object) -> NoReturn:
    for each in (number, *others):
        if is_captured(each):
            fields = vars(each)
            fields["_captures"].make_constant(slots_of(fields["_formula"]))
    raise Restart


def _formula_of(value: object) -> Formula | None:
    if is_captured(value):
        return parts_of(value)[0]  # type: ignore[arg-type]
    return ("constant", value) if type(value) in (int, float, bool) else None


def _arithmetic(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def method(self: CapturedNumber, *others: object) -> Any:
        operands = (*others, self) if reflected else (self, *others)
        formulas = [_formula_of(each) for each in operands]
        if None in formulas:
            return NotImplemented
        try:
            value = function(*(parts_of(each)[1] if is_captured(each) else each for each in operands))  # type: ignore[arg-type]
        except ArithmeticError:
            _need(self, *others)
        if type(value) not in (int, float):
            _need(self, *others)
        return CapturedNumber(vars(self)["_captures"], (function, *formulas), value)

    return method


def _needing(of_two: bool) -> Callable[..., Any]:
    def method(self: CapturedNumber, *others: object) -> Any:
        if of_two and _formula_of(others[0]) is None and others[0] is not None and not isinstance(others[0], str):
            return NotImplemented  # a tensor, which compares itself with a number
        _need(self, *others)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(CapturedNumber, f"__{_name}__", _arithmetic(getattr(operator, _name), False))
    setattr(CapturedNumber, f"__r{_name}__", _arithmetic(getattr(operator, _name), True))
for _name in ("neg", "pos", "abs"):
    setattr(CapturedNumber, f"__{_name}__", _arithmetic(getattr(operator, _name), False))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "lshift", "rshift", "divmod"):
    setattr(CapturedNumber, f"__{_name}__", _needing(True))
for _name in ("rand", "ror", "rxor", "rlshift", "rrshift", "rdivmod"):
    setattr(CapturedNumber, f"__{_name}__", _needing(True))
for _name in ("bool", "int", "float", "complex", "index", "hash", "str", "repr", "format", "round", "floor", "ceil", "trunc", "invert"):
    setattr(CapturedNumber, f"__{_name}__", _needing(False))
