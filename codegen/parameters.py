"""Kernel parameters: one list of fields from which both the C struct and its packing are made, so they cannot differ.

Whoever launches a kernel gives addresses by the names of operands and buffers. What a kernel makes of them follows from the names of its
fields, so nobody who launches needs to know which kernel it is.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from .sizes import has_sizes, of_sizes

TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT = 128, 64

_FORMATS = {"TensorMap": f"{TENSOR_MAP_BYTES}s", "i64": "q", "u64": "Q", "int": "i", "float": "f"}


@dataclass(frozen=True)
class Parameter:
    """One field of a kernel's `Parameters` struct: a C type and a name.

    The types are 'int', 'i64', 'u64', 'float', pointers, whose field takes the address of the operand or buffer of its name, and
    'TensorMap': the map of the one that the field is named after ('q_map').
    """

    c_type: str
    name: str

    def __post_init__(self) -> None:
        if not self.is_pointer and self.c_type not in _FORMATS:
            raise ValueError(f"a parameter's type must be a pointer or one of {', '.join(_FORMATS)}; got {self.c_type!r}")

    @property
    def is_pointer(self) -> bool:
        """Whether the field holds a device address."""
        return self.c_type.endswith("*")

    @property
    def is_tensor_map(self) -> bool:
        """Whether the field is a tensor map."""
        return self.c_type == "TensorMap"

    @property
    def format(self) -> str:
        """The field in the language of `struct`."""
        return "Q" if self.is_pointer else _FORMATS[self.c_type]

    @property
    def bytes(self) -> int:
        """Size of the field."""
        return struct.calcsize("=" + self.format)


@dataclass(frozen=True)
class AddressField:
    """Where an address goes, or the map of the tensor there: offset in the struct in bytes, name of the operand or buffer."""

    offset: int
    name: str


@dataclass(frozen=True)
class ParameterBlock:
    """The fields of a kernel's `Parameters` struct: tensor maps, pointers, then by falling size, so that C adds no padding inside."""

    fields: tuple[Parameter, ...]

    def with_fields(self, *more: Parameter) -> ParameterBlock:
        """A block that has these, too: each after those of its kind."""
        return ParameterBlock(tuple(sorted((*self.fields, *more), key=_kind, reverse=True)))

    def __post_init__(self) -> None:
        kinds = [_kind(field) for field in self.fields]
        if kinds != sorted(kinds, reverse=True):
            raise ValueError("parameter fields must be ordered: tensor maps, pointers, then 8-byte values, then 4-byte values")
        for field in self.fields:
            if field.is_tensor_map and not field.name.endswith("_map"):
                raise ValueError(f"a TensorMap must be named after its tensor, like q_map; got {field.name!r}")

    @cached_property
    def tensor_maps(self) -> tuple[AddressField, ...]:
        """Of the leading fields that are tensor maps."""
        mapped = [f.name.removesuffix("_map") for f in self.fields if f.is_tensor_map]
        return tuple(AddressField(TENSOR_MAP_BYTES * i, name) for i, name in enumerate(mapped))

    @cached_property
    def pointers(self) -> tuple[AddressField, ...]:
        """Of the fields after them that are pointers."""
        first = TENSOR_MAP_BYTES * len(self.tensor_maps)
        return tuple(AddressField(first + 8 * i, name) for i, name in enumerate(f.name for f in self.fields if f.is_pointer))

    @cached_property
    def values(self) -> tuple[Parameter, ...]:
        """The fields after those: what `pack` takes values for."""
        return self.fields[len(self.tensor_maps) + len(self.pointers) :]

    def values_of(self, known: Mapping[str, int | float]) -> dict[str, int | float]:
        """Of what is known of a call, by name, what `pack` takes. Raises KeyError for a field that is not known."""
        return {field.name: known[field.name] for field in self.values}

    @property
    def alignment(self) -> int:
        """Of the struct, in bytes."""
        return TENSOR_MAP_ALIGNMENT if self.tensor_maps else 8

    @property
    def signature(self) -> str:
        """Types and names as one line: what a stored kernel must agree with to be launched by this code."""
        return ", ".join(f"{f.c_type} {f.name}" for f in self.fields)

    @cached_property
    def values_begin(self) -> int:
        """Where the values begin, in bytes: after tensor maps and pointers."""
        return TENSOR_MAP_BYTES * len(self.tensor_maps) + 8 * len(self.pointers)

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        """The struct's bytes with empty tensor maps, null pointers and these values, by name, for the fields after them.

        The size is a multiple of `alignment`, as in C. Raises ValueError unless there is a value for each of those fields and no other.
        """
        return bytes(self.values_begin) + self.pack_values(values)

    def pack_values(self, values: Mapping[str, int | float]) -> bytes:
        """The part of `pack` from `values_begin` on."""
        return self.pack_in_order(self.in_order(values))

    def in_order(self, values: Mapping[str, int | float]) -> tuple[int | float, ...]:
        """The values in the order of the fields. Raises as `pack`."""
        names = self._layout[1]
        if len(values) != len(names) or not all(map(values.__contains__, names)):
            raise ValueError(f"values must be of {', '.join(names)}; got {', '.join(values)}")
        return tuple(map(values.__getitem__, names))

    def pack_in_order(self, values: Sequence[int | float]) -> bytes:
        """What `pack_values` makes of the values in the order of the fields. Of `Size`s among them, those between are packed beforehand."""
        if not has_sizes(*values):
            return self._layout[0].pack(*values)
        formats, given = list[str](), list[Any]()
        for varies, run in groupby(zip(self.values, values, strict=True), key=lambda one: has_sizes(one[1])):
            kinds, some = zip(*((field.format, value) for field, value in run), strict=True)
            packed = () if varies else (struct.pack("=" + "".join(kinds), *some),)
            formats += [f"{len(packed[0])}s"] if packed else kinds
            given += packed or some
        return of_sizes(struct.Struct(f"={''.join(formats)}{self._padding}x").pack)(*given)

    @cached_property
    def size(self) -> int:
        """Of the struct, in bytes."""
        return self.values_begin + self._layout[0].size

    @cached_property
    def _layout(self) -> tuple[struct.Struct, tuple[str, ...]]:
        """How the values are packed, with the padding at the end, and their names."""
        fields = "=" + "".join(field.format for field in self.values)
        return struct.Struct(f"{fields}{self._padding}x"), tuple(field.name for field in self.values)

    @cached_property
    def _padding(self) -> int:
        """Bytes after the values."""
        return -(self.values_begin + sum(field.bytes for field in self.values)) % self.alignment


def _kind(field: Parameter) -> tuple[bool, bool, int]:
    """By which the fields of a block are ordered, from the largest to the smallest."""
    return field.is_tensor_map, field.is_pointer, field.bytes
