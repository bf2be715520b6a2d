"""Tensor maps in a launch's parameters: 128 bytes each, encoded by the driver once an address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

from flashgen.codegen.parameters import TENSOR_MAP_BYTES
from flashgen.codegen.problem import Dtype
from flashgen.codegen.tensor_map import TensorMapShape

from .driver import check, driver

KEPT = 128  # maps of a field: a model of a hundred layers calls the same launch with as many addresses
_DTYPES = {Dtype.BF16: "BFLOAT16", Dtype.FP16: "FLOAT16", Dtype.FP32: "FLOAT32"}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


def encoded_map(shape: TensorMapShape, address: int) -> bytes:
    """The tensor map of a shape at a device address, by cuTensorMapEncodeTiled.

    Nothing is interleaved, elements out of bounds are 0, and the L2 is filled by 256 bytes. Raises DriverError with all that was asked for
    where the driver refuses it.
    """
    return _encoded(driver(), shape, address)


@lru_cache(maxsize=2**10)
def _encoded(cu: Any, shape: TensorMapShape, address: int) -> bytes:
    """As `encoded_map`. Kept beyond a plan: where only the keys become more, q and out often lie where they lay."""
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


class TensorMapFields:
    """The tensor maps in a launch's parameters.

    To encode a map takes microseconds, so it is done once an address: where a field has an address's map, nothing is left to do; maps of
    other addresses are copied.
    """

    __slots__ = ("_addresses", "_encode", "_fields", "_maps", "_parameters")

    def __init__(
        self,
        fields: tuple[tuple[int, TensorMapShape, int], ...],
        parameters: memoryview,
        encode: Callable[[TensorMapShape, int], bytes] = encoded_map,
    ) -> None:
        """fields: of each the index of its tensor among those of the launch, the tensor's shape, and where its bytes begin."""
        self._fields, self._parameters, self._encode = fields, parameters, encode
        self._addresses = [-1] * len(fields)
        self._maps: dict[tuple[int, int], bytes] = {}

    def fill(self, addresses: Sequence[int]) -> None:
        """Makes the fields the maps of the tensors at these addresses. Raises as `encoded_map`, and leaves a field that it cannot fill."""
        there = self._addresses
        for number, (index, _, _) in enumerate(self._fields):
            if there[number] != addresses[index]:
                self._replace(number, addresses[index])

    def _replace(self, number: int, address: int) -> None:
        _, shape, begin = self._fields[number]
        encoded = self._maps.get((number, address))
        if encoded is None:
            encoded = self._encode(shape, address)
            if len(self._maps) >= KEPT * len(self._fields):
                for old in list(self._maps)[: len(self._maps) // 2]:
                    del self._maps[old]
            self._maps[number, address] = encoded
        self._parameters[begin : begin + TENSOR_MAP_BYTES] = encoded
        self._addresses[number] = address
