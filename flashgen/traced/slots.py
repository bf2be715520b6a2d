"""How captured values are read: `Slot`, its readers, and what traces find out about values.

Each value that a trace reads is in a slot, which says how to read it anew from the slot before it, and what must be so of a value for the
trace to hold for it, too: the slot's guard. A trace that read nothing beside its slots holds for all functions whose slots pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

MISSING = object()  # an empty cell, a global that is not there
Guard = Callable[[Any, Sequence[Any]], bool]
"""Given a slot's value, and those of the slots before it."""
Reader = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class SameObject:
    """The guard of what must be the same object."""

    value: Any

    def __call__(self, new: Any, slots: Sequence[Any]) -> bool:
        """See Guard."""
        return new is self.value


@dataclass(frozen=True)
class OfType:
    """The guard of what must have the same type."""

    kind: type[Any]

    def __call__(self, new: Any, slots: Sequence[Any]) -> bool:
        """See Guard."""
        return type(new) is self.kind


def read_cell(function: FunctionType, index: int) -> Any:
    """What a closure's cell holds."""
    try:
        return function.__closure__[index].cell_contents  # type: ignore[index]
    except ValueError:
        return MISSING


def read_global(function: FunctionType, name: str) -> Any:
    """A global, or a builtin."""
    found = function.__globals__.get(name, MISSING)
    own: Any = function  # types of functions do not have it everywhere
    return own.__builtins__.get(name, MISSING) if found is MISSING else found


def read_attribute(owner: Any, name: str) -> Any:
    """An attribute."""
    return getattr(owner, name, MISSING)


def read_item(owner: Any, key: Any) -> Any:
    """An item of a tuple, a list or a dict."""
    return owner[key]


def read_call(owner: Any, _: None) -> Any:
    """What is called when an object is."""
    return type(owner).__call__


@dataclass(frozen=True)
class Slot:
    """Where a value is read: `read(value of slot parent, key)`. The first slot, the function itself, has no parent."""

    parent: int
    read: Reader
    key: Any
    guard: Guard


Path = tuple[tuple[Reader, Any], ...]


@dataclass
class Treatment:
    """What traces of a function have found out, by the paths of captured values.

    constants: numbers that are needed as they are; all_constants: all are
    shapes:    tensors whose sizes matter
    is_opaque: nothing can stand for what it captures, which it may look into: it is called as it is, on each call
    """

    constants: set[Path] = field(default_factory=set)
    shapes: set[Path] = field(default_factory=set)
    all_constants: bool = False
    is_opaque: bool = False
