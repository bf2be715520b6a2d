"""Tensor maps in a launch's parameters: 128 bytes each, encoded by the driver once an address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from flashgen.codegen.parameters import TENSOR_MAP_BYTES
from flashgen.codegen.problem import Dtype
from flashgen.codegen.tensor_map import TensorMapShape

from .driver import check, driver

KEPT = 128  # maps of a field: a model of a hundred layers calls the same launch with as many addresses
_DTYPES = {Dtype.BF16: "BFLOAT16", Dtype.FP16: "FLOAT16"}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


class Encoder:
    """cuTensorMapEncodeTiled for one shape: addresses to maps.

    Nothing is interleaved, elements out of bounds are 0, and the L2 is filled by 256 bytes.
    """

    def __init__(self, shape: TensorMapShape) -> None:
        cu = driver()
        rank = len(shape.sizes)
        self._shape, self._encode = shape, cu.cuTensorMapEncodeTiled
        self._before = (getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_DTYPES[shape.dtype]}"), rank)
        self._after = (
            [cu.cuuint64_t(size) for size in shape.sizes],
            [cu.cuuint64_t(stride) for stride in shape.strides],
            [cu.cuuint32_t(extent) for extent in shape.box],
            [cu.cuuint32_t(1)] * rank,
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[shape.swizzle_bytes]}"),
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )

    def __call__(self, address: int) -> bytes:
        """The map of the tensor at a device address. Raises DriverError, with all that was asked for, if the driver refuses it."""
        result = self._encode(*self._before, address, *self._after)
        encoded = check(result, f"encoding a tensor map of {self._shape} at address {address:#x}")
        return ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES)


class TensorMapField:
    """One tensor map in a launch's parameters.

    To encode a map takes microseconds, so it is done once an address: of the last address nothing is left to do, which the launch
    sees by `address`; of others the map is copied.
    """

    def __init__(self, encode: Callable[[int], bytes], place: memoryview) -> None:
        """`place`: the field's bytes among the parameters."""
        self.address = -1
        self._encode, self._place = encode, place
        self._maps: dict[int, bytes] = {}

    def fill(self, address: int) -> None:
        """Makes the field the map of the tensor at `address`. Raises as `Encoder`, and leaves it as it was then."""
        encoded = self._maps.get(address)
        if encoded is None:
            encoded = self._encode(address)
            if len(self._maps) >= KEPT:
                for old in list(self._maps)[: KEPT // 2]:
                    del self._maps[old]
            self._maps[address] = encoded
        self._place[:] = encoded
        self.address = address
