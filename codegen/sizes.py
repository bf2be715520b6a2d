"""Functions of sizes, from what Python does with a call of one size: `function_of_sizes` records it, and makes straight code of that.

Planning a call is a few thousand steps of Python, of which other sizes change a few dozen numbers. So it is done once with `Size`s in place
of numbers, which remember how each came about. Where a `Size` is compared, one way is taken, so the function gives None for sizes that
would take another: what it gives is what planning would. What cannot be remembered, as a number that decides how often a loop runs, raises
TypeError, and then there is no function. What is to be a step as a whole has `of_sizes`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Size:
    """A number, or what else a function of sizes gives, that remembers how it came about."""

    __slots__ = ("_name", "_steps", "_value")
    __hash__ = None  # type: ignore[assignment]  # a table would remember the number for ever, and not how it came about

    def __init__(self, steps: _Steps, name: str, value: Any) -> None:
        self._steps, self._name, self._value = steps, name, value

    def __bool__(self) -> bool:
        return self._steps.compared(self, "!=", 0)

    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"{name} of a size is not remembered")

    def bit_length(self) -> Size:
        """See int."""
        return self._steps.step("{}.bit_length()", operator.methodcaller("bit_length"), self)

    def __neg__(self) -> Size:
        return self._steps.step("-{}", operator.neg, self)

    def __abs__(self) -> Size:
        return self._steps.step("abs({})", abs, self)

    def __round__(self) -> Size:
        return self._steps.step("round({})", round, self)


_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne}
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_NEUTRAL = {"+": (0, 0), "-": (0, None), "*": (1, 1), "//": (1, None)}  # numbers that change nothing, behind a sign and in front of it


def _add_operators() -> None:
    def arithmetic(sign: str, function: Callable[..., Any]) -> tuple[Any, Any]:
        pattern, (behind, in_front) = f"{{}} {sign} {{}}", _NEUTRAL.get(sign, (None, None))

        def forward(self: Size, other: Any) -> Any:
            return self if type(other) is int and other == behind else self._steps.step(pattern, function, self, other)

        def backward(self: Size, other: Any) -> Any:
            return self if type(other) is int and other == in_front else self._steps.step(pattern, function, other, self)

        return forward, backward

    def comparison(sign: str) -> Any:
        return lambda self, other: self._steps.compared(self, sign, other)

    for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("floordiv", "//"), ("mod", "%"), ("truediv", "/"), ("lshift", "<<")):
        forward, backward = arithmetic(sign, getattr(operator, name))
        setattr(Size, f"__{name}__", forward)
        setattr(Size, f"__r{name}__", backward)
    for name, sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
        setattr(Size, f"__{name}__", comparison(sign))


_add_operators()
NUMBERS = frozenset({int, Size})  # types of what may stand where an int is asked for


def of_sizes(function: _Function) -> _Function:
    """The function as one step: where a number among its arguments is a `Size`, so is what it gives. For what is kept, or loops."""

    @wraps(function)
    def made(*arguments: Any) -> Any:
        for argument in arguments:
            if type(argument) is Size or (type(argument) is tuple and any(type(one) is Size for one in argument)):
                steps = next(_sizes_in(arguments))._steps
                name = steps.constant(function)
                return steps.step(f"{name}({', '.join('{}' for _ in arguments)})", function, *arguments)
        return function(*arguments)

    return made  # type: ignore[return-value]


common_divisor = of_sizes(math.gcd)


@of_sizes
def whole(number: float) -> int:
    """The number as an int."""
    return int(number)


def has_sizes(*values: Any) -> bool:
    """Whether there is a `Size` among these, or in tuples among them."""
    return next(_sizes_in(values), None) is not None


def _sizes_in(value: Any) -> Iterator[Size]:
    if type(value) is Size:
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _sizes_in(one)


class _Steps:
    """What is done with sizes, in order: lines of Python, each with the name that it gives, if it gives one, and those that it needs.

    facts: by the name of a size, what is known of it and a number: signs, and numbers
    """

    def __init__(self) -> None:
        self._lines: list[tuple[str, str, set[str]]] = []
        self._facts: dict[str, list[tuple[str, int]]] = {}
        self._known: dict[str, Size] = {}
        self._constants: dict[str, Any] = {}
        self._named: dict[int, str] = {}

    def size(self, name: str, value: Any) -> Size:
        """One that is given."""
        return Size(self, name, value)

    def constant(self, value: Any) -> str:
        """The name of what is the same in all calls."""
        name = self._named.get(id(value))
        if name is None:
            name = self._named[id(value)] = f"c{len(self._constants)}"
            self._constants[name] = value  # and keeps it alive, for its id
        return name

    def written(self, value: Any) -> str:
        """As Python, of numbers and others, and tuples of these."""
        if type(value) is Size:
            return str(value._name)
        if isinstance(value, tuple) and has_sizes(value):
            return f"({''.join(f'{self.written(one)}, ' for one in value)})"
        return f"({value})" if type(value) is int else self.constant(value)

    def step(self, pattern: str, function: Callable[..., Any], *operands: Any) -> Size:
        """What a function gives."""
        text = pattern.format(*map(self.written, operands))
        if text not in self._known:
            self._known[text] = size = Size(self, f"t{len(self._lines)}", function(*map(_value_of, operands)))
            self._lines.append((size._name, text, {one._name for one in _sizes_in(operands)}))
        return self._known[text]

    def compared(self, size: Size, sign: str, other: Any) -> bool:
        """Whether something is so. From here on it is known, as other sizes of which it is not take another way."""
        found = bool(_COMPARISONS[sign](size._value, _value_of(other)))
        if type(other) is int:
            self._facts.setdefault(size._name, []).append((sign if found else _OPPOSITE[sign], other))
        elif other is not size:
            text = f"{size._name} {sign} {self.written(other)}"
            if text not in self._known:
                self._known[text] = size
                self._lines.append(("", f"{'not ' if found else ''}({text})", {one._name for one in _sizes_in((size, other))}))
        return found

    def _ways(self, name: str) -> list[str]:
        """Lines that go on where all that is known of a size and numbers is so: of bounds the closest, and what they do not tell."""
        facts = self._facts.get(name, [])
        equal = [fact for fact in facts if fact[0] == "=="][:1]
        lower = sorted((fact for fact in facts if fact[0][0] == ">"), key=lambda fact: (fact[1], fact[0] == ">"))[-1:]
        upper = sorted((fact for fact in facts if fact[0][0] == "<"), key=lambda fact: (fact[1], fact[0] != "<"))[:1]
        bounds = equal or lower + upper
        others = {fact for fact in facts if fact[0] == "!=" and all(_COMPARISONS[sign](fact[1], bound) for sign, bound in bounds)}
        return [f"    if {name} {_OPPOSITE[sign]} {number}: return None" for sign, number in (*bounds, *sorted(others))]

    def function(self, arguments: tuple[tuple[Any, ...], ...], result: tuple[Any, ...]) -> Callable[..., Any]:
        """From arguments, tuples of given sizes and others, to the result: with no line that neither a comparison nor the result needs."""
        needed, lines = {one._name for one in _sizes_in(result)} | self._facts.keys(), list[str]()
        for name, text, needs in reversed(self._lines):
            if not name:
                lines.append(f"    if {text}: return None")
            elif name in needed:
                lines += (*self._ways(name), f"    {name} = {text}")
            else:
                continue
            needed |= needs
        names = [f"a{i}" for i in range(len(arguments))]
        taken = []
        for argument, entries in zip(names, arguments, strict=True):
            own = [str(one._name) if type(one) is Size and one._name in needed else "_" for one in entries]
            if {*own} - {"_"}:
                taken += [f"    {''.join(f'{name}, ' for name in own)}= {argument}", *[line for name in own for line in self._ways(name)]]
        text = "\n".join((f"def numbers({', '.join(names)}):", *taken, *reversed(lines), f"    return {self.written(result)}"))
        exec(compile(text, "<function of sizes>", "exec"), self._constants)
        made: Callable[..., Any] = self._constants["numbers"]
        return made


def _value_of(operand: Any) -> Any:
    if type(operand) is Size:
        return operand._value
    return tuple(map(_value_of, operand)) if isinstance(operand, tuple) else operand


def function_of_sizes(
    compute: Callable[..., tuple[Any, ...]], arguments: tuple[tuple[Any, ...], ...]
) -> Callable[..., tuple[Any, ...] | None]:
    """What gives of such arguments, tuples of numbers, what `compute` would, or None where that would take another way than of these.

    It may raise ArithmeticError, and what functions of `of_sizes` raise, and gives tuples in place of named ones.
    Raises TypeError where what `compute` does is not remembered, and as that does.
    """
    steps = _Steps()
    given = tuple(tuple(steps.size(f"s{i}_{j}", n) for j, n in enumerate(numbers)) for i, numbers in enumerate(arguments))
    return steps.function(given, compute(*given))
