"""Traces that are used again: for the same function, and for others of the same code whose captured values pass the guards.

Captured values are read anew on each call. So another number or tensor is seen without a trace, and what the function might do
differently (another branch, another type) is traced again. An open trace is never used again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from flashgen.codegen.expressions.bounds import NUMBER_LIMIT
from flashgen.codegen.expressions.tree import INT32, Expression, numbers_of, to_float32

from .captured_number import value_of
from .tracing import Trace, trace

_MOST_OF_ONE_CODE = 32
_MOST_CODES = 2**12


class Reading(NamedTuple):
    """A function in one call: its tree, and by their names in it the tensors and numbers that it has captured."""

    tree: Expression
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, int | float]


@dataclass
class _KeptTrace:
    """A trace without the values that were read for it, which must not be kept alive."""

    tree: Expression
    steps: tuple[tuple[int, Callable[[Any, Any], Any], Any, Callable[[Any, Sequence[Any]], bool]], ...]
    tensors: tuple[tuple[str, int], ...]
    numbers: tuple[tuple[str, Any, type[Any], bool], ...]  # name, formula, the type of what it gives, whether the tree has it as an integer

    @classmethod
    def of(cls, made: Trace) -> _KeptTrace:
        whole = {each.value: each.type is INT32 for each in numbers_of(made.tree)}
        return cls(
            made.tree,
            tuple((slot.parent, slot.read, slot.key, slot.guard) for slot in made.slots[1:]),
            tuple((name, slot) for name, slot in made.tensors.items()),
            tuple((name, made.numbers[name], type(value_of(made.numbers[name], made.values)), is_int) for name, is_int in whole.items()),
        )

    def read(self, function: Any) -> Reading | None:
        """The function's captured values, read anew; None if a guard says that it must be traced."""
        values = [function]
        for parent, read, key, guard in self.steps:
            value = read(values[parent], key)
            if not guard(value, values):
                return None
            values.append(value)
        numbers = self.numbers_in(values)
        return None if numbers is None else Reading(self.tree, {name: values[slot] for name, slot in self.tensors}, numbers)

    def numbers_in(self, values: Sequence[Any]) -> dict[str, int | float] | None:
        """The numbers of slots with these values; None where one has another type than in the trace, or is too large."""
        numbers: dict[str, int | float] = {}
        for name, formula, kind, is_int in self.numbers:
            try:
                value: Any = value_of(formula, values)
            except ArithmeticError:
                return None
            fits = not is_int or -NUMBER_LIMIT <= value <= NUMBER_LIMIT
            if not fits or type(value) is not kind:
                return None
            numbers[name] = value if is_int else to_float32(value)
        return numbers


@dataclass
class TraceCache:
    """Traces of functions that are given as one argument, by the functions' code. `traces`: how many were made."""

    argument: str
    traces: int = 0
    _kept: dict[Any, list[tuple[Callable[[Any, Any], bool], _KeptTrace]]] = field(default_factory=dict)

    def read(self, function: Callable[..., Any]) -> Reading:
        """The function in this call. Raises ArgumentError as `trace` does."""
        key = _code_of(function)
        for guard, kept in self._kept.get(key, ()):
            if guard(function, ()):
                found = kept.read(function)
                if found is not None:
                    return found
        self.traces += 1
        made = trace(function, self.argument)
        kept = _KeptTrace.of(made)
        tensors = {name: made.values[slot] for name, slot in made.tensors.items()} | dict(made.met)
        reading = Reading(made.tree, tensors, kept.numbers_in(made.values) or {})
        if made.is_open:
            return reading
        if len(self._kept) >= _MOST_CODES:
            self._kept.clear()
        others = self._kept.setdefault(key, [])
        self._kept[key] = [(made.slots[0].guard, kept), *others[: _MOST_OF_ONE_CODE - 1]]
        return reading


def _code_of(function: Any) -> Any:
    """What functions that may share a trace have in common."""
    kind = type(function)
    if kind is FunctionType:
        return function.__code__
    if kind is MethodType:
        return _code_of(function.__func__)
    return _code_of(function.func) if kind is functools.partial else kind
