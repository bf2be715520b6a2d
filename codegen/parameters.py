"""Kernel parameters: one list of fields from which both the C struct and the host's packing are made, so they cannot differ.

Whoever launches a kernel gives addresses, the same ones in the same order for every kernel: `ADDRESSES`. What a kernel makes of them
follows from the names of its fields, so nobody who launches needs to know which kernel it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ADDRESSES = ("q", "k", "v", "out", "lse", "tile_counter")
"""What a launch is given: the addresses of the tensors and of an int, each for kernels that have a field for it.

lse: 0 if nobody wants it
tile_counter: 0, unless the family's `counts_tiles`; then of an int that is 0 when the kernel begins, that nothing else uses meanwhile,
              and that the kernel leaves 0
"""

MAPPED = ("q", "k", "v", "out")
"""The tensors that there can be tensor maps of."""

TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT = 128, 64

_FORMATS = {"TensorMap": f"{TENSOR_MAP_BYTES}s", "i64": "q", "u64": "Q", "int": "i", "float": "f"}


@dataclass(frozen=True)
class Parameter:
    """One field of a kernel's `Parameters` struct: a C type and a name.

    The types are 'int', 'i64', 'u64', 'float', pointers, whose field takes the address that has its name in `ADDRESSES`, and
    'TensorMap': the map of the tensor in `MAPPED` that the field is named after ('q_map').
    """

    c_type: str
    name: str

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
class Place:
    """Where an address goes, or the map of the tensor there: offset in the struct in bytes, index in `ADDRESSES`."""

    offset: int
    index: int


@dataclass(frozen=True)
class ParameterBlock:
    """The fields of a kernel's `Parameters` struct: tensor maps, pointers, then by falling size, so that C adds no padding inside."""

    fields: tuple[Parameter, ...]

    def __post_init__(self) -> None:
        order = [(f.is_tensor_map, f.is_pointer, f.bytes) for f in self.fields]
        if order != sorted(order, reverse=True):
            raise ValueError("parameter fields must be ordered: tensor maps, pointers, then 8-byte values, then 4-byte values")
        for field in self.fields:
            allowed = [f"{tensor}_map" for tensor in MAPPED] if field.is_tensor_map else ADDRESSES
            if (field.is_tensor_map or field.is_pointer) and field.name not in allowed:
                raise ValueError(f"a {field.c_type} must be named one of {', '.join(allowed)}; got {field.name!r}")

    @cached_property
    def tensor_maps(self) -> tuple[Place, ...]:
        """Of the leading fields that are tensor maps."""
        return self._places([f.name.removesuffix("_map") for f in self.fields if f.is_tensor_map], 0, TENSOR_MAP_BYTES)

    @cached_property
    def pointers(self) -> tuple[Place, ...]:
        """Of the fields after them that are pointers."""
        return self._places([f.name for f in self.fields if f.is_pointer], TENSOR_MAP_BYTES * len(self.tensor_maps), 8)

    @staticmethod
    def _places(names: Sequence[str], offset: int, size: int) -> tuple[Place, ...]:
        return tuple(Place(offset + size * i, ADDRESSES.index(name)) for i, name in enumerate(names))

    @cached_property
    def values(self) -> tuple[Parameter, ...]:
        """The fields after those: what `pack` takes values for."""
        return self.fields[len(self.tensor_maps) + len(self.pointers) :]

    @cached_property
    def has_tile_counter(self) -> bool:
        """Whether a launch must be given the last of `ADDRESSES`."""
        return any(place.index == ADDRESSES.index("tile_counter") for place in self.pointers)

    @property
    def alignment(self) -> int:
        """Of the struct, in bytes."""
        return TENSOR_MAP_ALIGNMENT if self.tensor_maps else 8

    @property
    def signature(self) -> str:
        """Types and names as one line: what a stored kernel must agree with to be launched by this code."""
        return ", ".join(f"{f.c_type} {f.name}" for f in self.fields)

    def pack(self, values: Sequence[int | float]) -> bytes:
        """The struct's bytes with empty tensor maps, null pointers and these values for the fields after them.

        The size is a multiple of `alignment`, as in C.
        """
        empty = [bytes(TENSOR_MAP_BYTES)] * len(self.tensor_maps) + [0] * len(self.pointers)
        packed = struct.pack("=" + "".join(f.format for f in self.fields), *empty, *values)
        return packed + bytes(-len(packed) % self.alignment)
