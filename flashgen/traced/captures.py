"""What a function captures: cells, globals, defaults, attributes and items, each in a slot (slots.py), and stand-ins for them."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn, Protocol

import torch

from flashgen.codegen.expressions.bounds import NUMBER_LIMIT

from .captured_number import CapturedNumber
from .code_scan import is_library_function, scanned
from .object_stand_in import ObjectStandIn
from .refusal import Restart
from .slots import MISSING, Guard, OfType, Path, Reader, SameObject, Slot, Treatment, read_attribute, read_cell, read_global, read_item

_MOST_ITEMS = 64  # of a captured tuple, list or dict, for each of which there is a slot
_MOST_SLOTS = 1000


class TensorStandIns(Protocol):
    """Who makes stand-ins of tensors."""

    def tensor(self, tensor: torch.Tensor, slot: int) -> Any:
        """The stand-in of a captured tensor."""


class Captures:
    """The slots of one trace. `is_open`: whether something was read that has no slot, so that the trace holds for this call alone."""

    def __init__(self, treatment: Treatment, tensors: TensorStandIns, refuse: Callable[[str, str], NoReturn]) -> None:
        self.treatment, self._tensors, self._refuse = treatment, tensors, refuse
        self.slots: list[Slot] = []
        self.values: list[Any] = []
        self.is_open = self.has_effects = False
        self.wants_restart = False
        self._paths: list[Path] = []
        self._stand_ins: list[Any] = []
        self._tensor_slots: dict[int, int] = {}
        self._containers: list[tuple[int, Any, Any]] = []
        self._known: dict[tuple[int, Reader, Any], Any] = {}

    def root(self, function: Callable[..., Any]) -> Any:
        """The stand-in of the function that is traced."""
        if not self.treatment.is_opaque:
            return self._stand_in(function, -1, read_attribute, None)
        self.is_open = True
        self.slots.append(Slot(-1, read_attribute, None, lambda new, slots: False))
        self.values.append(function)
        return function

    def captured(self, owner: int, read: Reader, key: Any) -> Any:
        """The stand-in of what is read of a slot's value. Of a cell, global or attribute that is not there, MISSING."""
        known = self._known.get((owner, read, key), self)
        if known is not self:
            return known
        with torch._C.DisableTorchFunction():  # what a property computes is no part of the trace
            made = self._known[owner, read, key] = self._stand_in(read(self.values[owner], key), owner, read, key)
        return made

    def restart(self) -> NoReturn:
        """Ends the trace: its treatment has changed."""
        self.wants_restart = True
        raise Restart

    def make_constant(self, slots: set[int]) -> None:
        """See KnowsSlots."""
        self.treatment.constants |= {self._paths[slot] for slot in slots}
        self.wants_restart = True

    def needs_shape(self, slot: int) -> None:
        """The sizes of this tensor are read: they are guarded from the next trace on."""
        if self._paths[slot] not in self.treatment.shapes:
            self.treatment.shapes.add(self._paths[slot])
            self.restart()

    def refuse_change(self, slot: int) -> NoReturn:
        """The function changes what it captures."""
        self.has_effects = True
        self._refuse("not change what it captures", f"a change of an object of type {type(self.values[slot]).__qualname__}")

    def require_unchanged(self) -> None:
        """Refuses a function that has changed a captured list or dict, of which it has had a copy."""
        for slot, now, before in self._containers:
            pairs = (now.items(), before.items()) if type(now) is dict else (enumerate(now), enumerate(before))
            if len(now) != len(before) or any(a[0] != b[0] or a[1] is not b[1] for a, b in zip(*pairs, strict=True)):
                self.refuse_change(slot)

    def make_opaque(self) -> NoReturn:
        """Something is done with a captured value that no stand-in can do."""
        self.treatment.is_opaque = True
        self.restart()

    def _stand_in(self, value: Any, parent: int, read: Reader, key: Any) -> Any:
        path = () if parent < 0 else (*self._paths[parent], (read, key))
        index = len(self.slots)
        if index >= _MOST_SLOTS:
            self.make_opaque()
        self.slots.append(Slot(parent, read, key, lambda value, slots: True))
        self.values.append(value)
        self._paths.append(path)
        self._stand_ins.append(value)
        guard, make = self._kind(value, index, path)
        self.slots[index] = Slot(parent, read, key, guard)
        if make is None:
            return value
        made = self._stand_ins[index] = make(index)
        return made

    def _kind(self, value: Any, index: int, path: Path) -> tuple[Guard, Callable[[int], Any] | None]:
        """A value's guard, and what makes its stand-in, if it has another one than itself."""
        kind = type(value)
        if kind in (int, float):
            return self._number_kind(value, path)
        if isinstance(value, torch.Tensor):
            return self._tensor_kind(value, index, path)
        if value is MISSING or value is None or kind in (bool, str, bytes, torch.dtype, torch.device, type(...)):
            return (lambda new, slots: type(new) is kind and new == value), None
        if isinstance(value, (enum.Enum, enum.EnumMeta)) or is_library_function(value):
            return SameObject(value), None
        before = self._ancestor(value, index)
        if isinstance(value, BuiltinFunctionType) or (before is not None and kind in (tuple, list, dict)):
            self.make_opaque()  # such as time.time, or a method of an object; a list that has itself
        if before is not None:
            return (lambda new, slots: new is slots[before]), lambda index: self._stand_ins[before]
        if kind in (tuple, list, dict):
            return self._container_kind(value)
        if kind is FunctionType:
            return self._function_kind(value)
        if kind is MethodType:
            make = lambda i: MethodType(*(self.captured(i, read_attribute, name) for name in ("__func__", "__self__")))  # noqa: E731
            return OfType(kind), make
        if kind is functools.partial:
            return OfType(kind), self._partial
        if isinstance(value, (type, ModuleType)):
            return SameObject(value), self._object
        return OfType(kind), self._object

    def _ancestor(self, value: Any, index: int) -> int | None:
        """The slot of the same object on the way here: a function that names itself, the object of a method."""
        parent = self.slots[index].parent
        while parent >= 0:
            if self.values[parent] is value:
                return parent
            parent = self.slots[parent].parent
        return None

    def _number_kind(self, value: int | float, path: Path) -> tuple[Guard, Callable[[int], Any] | None]:
        kind, treatment = type(value), self.treatment
        fits = kind is float or -NUMBER_LIMIT <= value <= NUMBER_LIMIT
        if not fits or treatment.all_constants or path in treatment.constants:
            sign = math.copysign(1.0, value) if kind is float else 0.0
            if value != value:
                return (lambda new, slots: type(new) is float and new != new), None
            return (lambda new, slots: type(new) is kind and new == value and (not sign or math.copysign(1.0, new) == sign)), None
        make = lambda index: CapturedNumber(self, ("slot", index), value)  # noqa: E731
        if kind is float:
            return OfType(float), make
        return (lambda new, slots: type(new) is int and -NUMBER_LIMIT <= new <= NUMBER_LIMIT), make

    def _tensor_kind(self, value: torch.Tensor, index: int, path: Path) -> tuple[Guard, Callable[[int], Any]]:
        same = self._tensor_slots.setdefault(id(value), index)
        if same != index:  # of two functions that use one tensor, say
            return (lambda new, slots: new is slots[same]), lambda index: self._stand_ins[same]
        kind, dtype, dimensions = type(value), value.dtype, value.dim()

        def guard(new: Any, slots: Sequence[Any]) -> bool:
            return type(new) is kind and new.dtype is dtype and new.dim() == dimensions

        if path not in self.treatment.shapes:
            return guard, lambda index: self._tensors.tensor(value, index)
        shape = value.shape
        return (lambda new, slots: guard(new, slots) and new.shape == shape), lambda index: self._tensors.tensor(value, index)

    def _container_kind(self, value: Any) -> tuple[Guard, Callable[[int], Any] | None]:
        kind, length = type(value), len(value)
        if length > _MOST_ITEMS or (kind is dict and not all(type(key) in (str, int) for key in value)):
            self.make_opaque()
        if kind is dict:
            keys = list(value)
            return (
                lambda new, slots: type(new) is dict and list(new) == keys,
                lambda index: self._container(index, {key: self.captured(index, read_item, key) for key in keys}),
            )
        return (
            lambda new, slots: type(new) is kind and len(new) == length,
            lambda index: self._container(index, kind(self.captured(index, read_item, item) for item in range(length))),
        )

    def _container(self, index: int, made: Any) -> Any:
        self._containers.append((index, made, made.copy() if type(made) is dict else tuple(made)))
        return made

    def _function_kind(self, value: FunctionType) -> tuple[Guard, Callable[[int], Any] | None]:
        code, scan = value.__code__, scanned(value.__code__)
        if scan.assigned:
            self.has_effects = True
            self._refuse("not assign to variables that it captures", f"{value.__qualname__}, which assigns to {', '.join(scan.assigned)}")
        if scan.opaque:
            self.make_opaque()
        return (lambda new, slots: type(new) is FunctionType and new.__code__ is code), self._function

    def _function(self, index: int) -> FunctionType:
        """The function with stand-ins for all that it captures."""
        original: FunctionType = self.values[index]
        cells = tuple(CellType() for _ in original.__code__.co_freevars)
        names = dict(original.__globals__)
        made = FunctionType(original.__code__, names, original.__name__, None, cells)
        self._stand_ins[index] = made
        for i, cell in enumerate(cells):
            content = self.captured(index, read_cell, i)
            if content is not MISSING:
                cell.cell_contents = content
        for name in scanned(original.__code__).global_names:
            content = self.captured(index, read_global, name)
            if content is not MISSING:
                names[name] = content
        if original.__defaults__ is not None or original.__kwdefaults__ is not None:
            made.__defaults__ = self.captured(index, read_attribute, "__defaults__")
            made.__kwdefaults__ = self.captured(index, read_attribute, "__kwdefaults__")
        return made

    def _partial(self, index: int) -> Any:
        function, args, keywords = (self.captured(index, read_attribute, name) for name in ("func", "args", "keywords"))
        return functools.partial(function, *args, **keywords)

    def _object(self, index: int) -> ObjectStandIn:
        return ObjectStandIn(self, index)
