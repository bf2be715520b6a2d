"""The memory from which a launch takes a kernel's parameters."""

from __future__ import annotations

import ctypes

from flashgen.codegen.parameters import TENSOR_MAP_ALIGNMENT


def parameter_buffer(contents: bytes | bytearray) -> ctypes.Array[ctypes.c_char]:
    """A copy of a packed `Parameters` struct, aligned for any field that there can be."""
    room = ctypes.create_string_buffer(len(contents) + TENSOR_MAP_ALIGNMENT - 1)
    buffer = (ctypes.c_char * len(contents)).from_buffer(room, -ctypes.addressof(room) % TENSOR_MAP_ALIGNMENT)  # keeps `room` alive
    buffer.raw = bytes(contents)
    return buffer
