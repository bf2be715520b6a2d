"""`ObjectStandIn`: stands for an object, a class or a module that a function captures."""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any, NoReturn, Protocol

import torch

from .slots import MISSING, Reader, read_attribute, read_call


class ReadsSlots(Protocol):
    """Who makes the stand-ins: see Captures."""

    values: list[Any]

    def captured(self, owner: int, read: Reader, key: Any) -> Any:
        """The stand-in of what is read of a slot's value."""

    def make_opaque(self) -> NoReturn:
        """The value itself is needed."""

    def refuse_change(self, slot: int) -> NoReturn:
        """The function changes the value."""


class ObjectStandIn:
    """Stands for a captured object: reads its attributes, each into a slot, and calls it. For all else the object itself is needed."""

    __slots__ = ("_captures", "_slot")

    def __init__(self, captures: ReadsSlots, slot: int) -> None:
        object.__setattr__(self, "_captures", captures)
        object.__setattr__(self, "_slot", slot)

    def __getattribute__(self, name: str) -> Any:
        captures, slot = _fields(self)
        if name == "__class__":
            return type(captures.values[slot])
        found = captures.captured(slot, read_attribute, name)
        return captures.make_opaque() if found is MISSING else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """By the `__call__` of its class, if that is a function."""
        captures, slot = _fields(self)
        value = captures.values[slot]
        is_library = isinstance(value, (type, ModuleType, torch.nn.Module))
        if is_library or type(getattr(type(value), "__call__", None)) is not FunctionType:  # noqa: B004 (which function it is)
            captures.make_opaque()
        return captures.captured(slot, read_call, None)(self, *args, **kwargs)


def _fields(stand_in: ObjectStandIn) -> tuple[ReadsSlots, int]:
    return object.__getattribute__(stand_in, "_captures"), object.__getattribute__(stand_in, "_slot")


def _needs_object(self: ObjectStandIn, *args: Any) -> NoReturn:
    _fields(self)[0].make_opaque()


def _changes_object(self: ObjectStandIn, *args: Any) -> NoReturn:
    captures, slot = _fields(self)
    captures.refuse_change(slot)


for _name in ("setattr", "delattr", "setitem", "delitem"):
    setattr(ObjectStandIn, f"__{_name}__", _changes_object)
for _name in (
    *("bool", "eq", "ne", "hash", "str", "repr", "format", "getitem", "len", "iter", "contains", "lt"),
    *("le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow"),
    *("rpow", "and", "rand", "or", "ror", "xor", "rxor", "neg", "pos", "abs", "invert", "int", "float", "index", "complex", "enter"),
    *("next", "reversed", "matmul", "rmatmul"),
):
    setattr(ObjectStandIn, f"__{_name}__", _needs_object)
