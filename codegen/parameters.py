"""Kernel parameters: one list of fields from which both the C struct and the host's packing are made, so they cannot differ."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

_FORMATS = {"i64": "q", "u64": "Q", "int": "i", "float": "f"}


@dataclass(frozen=True)
class Parameter:
    """One field of a kernel's `Parameters` struct: a C type ('int', 'i64', 'u64', 'float', or a pointer) and a name."""

    c_type: str
    name: str

    @property
    def is_pointer(self) -> bool:
        """Whether the field holds a device address."""
        return self.c_type.endswith("*")

    @property
    def format(self) -> str:
        """The field's `struct` format character."""
        return "Q" if self.is_pointer else _FORMATS[self.c_type]


@dataclass(frozen=True)
class ParameterBlock:
    """The fields of a kernel's `Parameters` struct, in order: pointers first, then by falling size, so that C adds no padding inside."""

    fields: tuple[Parameter, ...]

    def __post_init__(self) -> None:
        sizes = [struct.calcsize("=" + f.format) for f in self.fields]
        if sizes != sorted(sizes, reverse=True) or [f.is_pointer for f in self.fields] != sorted(
            (f.is_pointer for f in self.fields), reverse=True
        ):
            raise ValueError("parameter fields must be ordered: pointers, then 8-byte values, then 4-byte values")

    @property
    def pointers(self) -> int:
        """How many leading fields are pointers."""
        return sum(f.is_pointer for f in self.fields)

    @property
    def signature(self) -> str:
        """Types and names as one line: what a stored kernel must agree with to be launched by this code."""
        return ", ".join(f"{f.c_type} {f.name}" for f in self.fields)

    def pack(self, values: Sequence[int | float]) -> bytes:
        """The struct's bytes with null pointers and these values for the fields after them. Size a multiple of 8, as in C."""
        text = "=" + "".join(f.format for f in self.fields)
        packed = struct.pack(text, *([0] * self.pointers), *values)
        return packed + bytes(-len(packed) % 8)
