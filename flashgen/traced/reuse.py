"""Traces that are used again: for the same function, and for others of the same code whose captured values pass the guards.

Captured values are read anew on each call. So another number or tensor is seen without a trace, and what the function might do
differently (another branch, another type) is traced again. An open trace is never used again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any

import torch

from flashgen.codegen.expressions.bounds import NUMBER_LIMIT
from flashgen.codegen.expressions.tree import INT32, Expression, loads_of, numbers_of, to_float32

from .captured_number import Formula, value_of
from .slots import Guard, OfType, Reader, SameObject
from .tracing import Trace, trace

_MOST_OF_ONE_CODE = 32
_MOST_CODES = 2**12


@dataclass(eq=False)
class KeptTrace:
    """A trace without the values that were read for it, which must not be kept alive.

    steps:   its slots but the first: parent, reader, key, and guard, or what a SameObject or an OfType asks for, which needs no call then
    tensors: slots of the tensors in the tree
    numbers: of each number in the tree the formula, its slot if the formula is no more than that or else -1, the type of what it gives, and
             whether the tree has it as an integer
    is_open: whether it holds for one call alone
    """

    tree: Expression
    steps: tuple[tuple[int, Reader, Any, Guard | None, type[Any] | None, Any], ...]
    tensor_names: tuple[str, ...]
    tensors: tuple[int, ...]
    number_names: tuple[str, ...]
    numbers: tuple[tuple[Formula, int, type[Any], bool], ...]
    is_open: bool = False

    @classmethod
    def of(cls, made: Trace) -> KeptTrace:
        """What is kept of a trace."""
        whole = {each.value: each.type is INT32 for each in numbers_of(made.tree)}
        loaded = tuple(dict.fromkeys(each.value.tensor for each in loads_of(made.tree) if each.value.tensor in made.tensors))
        numbers = []
        for name, is_int in whole.items():
            formula = made.numbers[name]
            slot = formula[1] if formula[0] == "slot" else -1
            numbers.append((formula, slot, type(value_of(formula, made.values)), is_int))
        steps = tuple((slot.parent, slot.read, slot.key, *_asked(slot.guard)) for slot in made.slots[1:])
        return cls(made.tree, steps, loaded, tuple(made.tensors[name] for name in loaded), tuple(whole), tuple(numbers))

    def read(self, function: Any) -> Reading | None:
        """The function's captured values, read anew; None if a guard says that it must be traced."""
        values = [function]
        for parent, read, key, guard, kind, same in self.steps:
            value = read(values[parent], key)
            if guard is not None:
                if not guard(value, values):
                    return None
            elif value is not same if kind is None else type(value) is not kind:
                return None
            values.append(value)
        return self.reading(values)

    def reading(self, values: Sequence[Any]) -> Reading | None:
        """The trace with these values in its slots; None where a number has another type than in the trace, or is too large."""
        tensors = tuple([values[slot] for slot in self.tensors]) if self.tensors else ()
        if not self.numbers:
            return self, tensors, ()
        numbers: list[int | float] = []
        for formula, slot, kind, is_int in self.numbers:
            try:
                value: Any = value_of(formula, values) if slot < 0 else values[slot]
            except ArithmeticError:
                return None
            fits = not is_int or -NUMBER_LIMIT <= value <= NUMBER_LIMIT
            if not fits or type(value) is not kind:
                return None
            numbers.append(value if is_int else to_float32(value))
        return self, tensors, tuple(numbers)


Reading = tuple[KeptTrace, tuple[torch.Tensor, ...], tuple[int | float, ...]]
"""A function in one call: its trace, and the tensors and numbers that it has captured. Without names of its own: each call makes some."""


@dataclass
class TraceCache:
    """Traces of functions that are given as one argument, by the functions' code. `traces`: how many were made."""

    argument: str
    traces: int = 0
    _kept: dict[Any, list[tuple[Callable[[Any, Any], bool], KeptTrace]]] = field(default_factory=dict)

    def read(self, function: Callable[..., Any]) -> Reading:
        """The function in this call. Raises ArgumentError as `trace` does."""
        key = function.__code__ if type(function) is FunctionType else _code_of(function)
        for guard, kept in self._kept.get(key, ()):
            if guard(function, ()):
                found = kept.read(function)
                if found is not None:
                    return found
        self.traces += 1
        made = trace(function, self.argument)
        kept = KeptTrace.of(made)
        reading = kept.reading(made.values)
        assert reading is not None  # these are the values that it was made of
        if made.is_open:
            _, tensors, numbers = reading
            return replace(kept, tensor_names=(*kept.tensor_names, *made.met), is_open=True), (*tensors, *made.met.values()), numbers
        if len(self._kept) >= _MOST_CODES:
            self._kept.clear()
        others = self._kept.setdefault(key, [])
        self._kept[key] = [(made.slots[0].guard, kept), *others[: _MOST_OF_ONE_CODE - 1]]
        return reading


def _asked(guard: Guard) -> tuple[Guard | None, type[Any] | None, Any]:
    """A guard, or the type or the object that it asks for."""
    if isinstance(guard, OfType):
        return None, guard.kind, None
    return (None, None, guard.value) if isinstance(guard, SameObject) else (guard, None, None)


def _code_of(function: Any) -> Any:
    """What functions that may share a trace have in common."""
    kind = type(function)
    if kind is FunctionType:
        return function.__code__
    if kind is MethodType:
        return _code_of(function.__func__)
    return _code_of(function.func) if kind is functools.partial else kind
