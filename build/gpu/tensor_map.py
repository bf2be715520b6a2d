"""Tensor maps in a launch's parameters: 128 bytes each, encoded by the driver once an address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

from flashgen.codegen.parameters import TENSOR_MAP_BYTES
from flashgen.codegen.problem import Dtype
from flashgen.codegen.tensor_map import TensorMapShape

from .driver import check, driver

KEPT = 128  # maps of a field: a model of a hundred layers calls the same launch with as many addresses
_DTYPES = {Dtype.BF16: "BFLOAT16", Dtype.FP16: "FLOAT16", Dtype.FP32: "FLOAT32"}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


def encoder(shape: TensorMapShape) -> Callable[[int], bytes]:
    """What encodes the tensor maps of one shape by cuTensorMapEncodeTiled, given a device address.

    Nothing is interleaved, elements out of bounds are 0, and the L2 is filled by 256 bytes. Where the driver refuses a map, the call
    raises DriverError with all that was asked for.
    """
    return partial(_encoded, driver(), shape)


@lru_cache(maxsize=2**10)
def _encoded(cu: Any, shape: TensorMapShape, address: int) -> bytes:
    """As `encoder`. Kept beyond a plan: where only the keys become more, q and out often lie where they lay."""
    dtype, box, steps, options = _constants(cu, shape.dtype, shape.box, shape.swizzle_bytes)
    # The sizes are made here: kept, they would be dozens of objects a plan for the garbage collector to walk. Strides are the same for
    # many lengths of a slice of a cache.
    sizes, strides = [*map(cu.cuuint64_t, shape.sizes)], _strides(cu, shape.strides)
    status, encoded = cu.cuTensorMapEncodeTiled(dtype, len(sizes), address, sizes, strides, box, steps, *options)
    if status:
        check((status,), f"encoding a tensor map of {shape} at address {address:#x}")
    return ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES)


@lru_cache(maxsize=2**6)
def _strides(cu: Any, strides: tuple[int, ...]) -> list[Any]:
    return [*map(cu.cuuint64_t, strides)]


@cache
def _constants(cu: Any, dtype: Dtype, box: tuple[int, ...], swizzle_bytes: int) -> tuple[Any, list[Any], list[Any], tuple[Any, ...]]:
    """What a kernel's config decides: the driver's element type, the box, steps of 1, and what follows the steps."""
    options = (
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[swizzle_bytes]}"),
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return (
        getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_DTYPES[dtype]}"),
        [*map(cu.cuuint32_t, box)],
        [cu.cuuint32_t(1)] * len(box),
        options,
    )


class TensorMapField:
    """One tensor map in a launch's parameters.

    To encode a map takes microseconds, so it is done once an address: of the last address nothing is left to do, which the launch
    sees by `address`; of others the map is copied.
    """

    __slots__ = ("_begin", "_encode", "_maps", "_parameters", "address")

    def __init__(self, encode: Callable[[int], bytes], parameters: memoryview, begin: int) -> None:
        """`begin`: of the field's bytes among those of the parameters."""
        self.address = -1
        self._encode, self._parameters, self._begin = encode, parameters, begin
        self._maps: dict[int, bytes] = {}

    def fill(self, address: int) -> None:
        """Makes the field the map of the tensor at `address`. Raises as `encoder`, and leaves it as it was then."""
        encoded = self._maps.get(address)
        if encoded is None:
            encoded = self._encode(address)
            if len(self._maps) >= KEPT:
                for old in list(self._maps)[: KEPT // 2]:
                    del self._maps[old]
            self._maps[address] = encoded
        self._parameters[self._begin : self._begin + TENSOR_MAP_BYTES] = encoded
        self.address = address
