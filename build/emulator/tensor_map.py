"""Tensor maps of a kernel in the emulator: 128 bytes each, written here as the driver would encode them for a GPU.

A map is what follows, in the machine's byte order; entries beyond the rank are 0:

    struct alignas(64) TensorMap {
        uint64_t address;
        uint64_t strides[4];    // bytes, of dimension 1 and so on
        uint32_t sizes[5];      // elements, innermost first
        uint16_t box[5];        // elements
        uint8_t rank, element_bytes, swizzle_bytes;
    };
"""

from __future__ import annotations

import struct

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.tensor_map import MAX_RANK, TensorMapShape

FORMAT = struct.Struct("=Q4Q5I5H3B55x")


def emulated_map(shape: TensorMapShape, address: int) -> bytes:
    """The map of a tensor at an address of this process, as a kernel on the CPU takes it: see the top of this file.

    Raises ArgumentError for the one size that does not fit, 2^32.
    """
    if max(shape.sizes) >= 2**32:
        raise ArgumentError(f"sizes must be below 2^32 on the CPU; got {shape.sizes}")

    def filled(values: tuple[int, ...], count: int) -> tuple[int, ...]:
        return values + (0,) * (count - len(values))

    return FORMAT.pack(
        address,
        *filled(shape.strides, MAX_RANK - 1),
        *filled(shape.sizes, MAX_RANK),
        *filled(shape.box, MAX_RANK),
        len(shape.sizes),
        shape.dtype.bytes,
        shape.swizzle_bytes,
    )
