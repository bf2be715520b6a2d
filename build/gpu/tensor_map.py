"""Tensor maps in a launch's parameters: 128 bytes each, encoded by the driver once an address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from flashgen.codegen.parameters import TENSOR_MAP_BYTES
from flashgen.codegen.problem import Dtype
from flashgen.codegen.sizes import has_sizes, of_sizes
from flashgen.codegen.tensor_map import TensorMapShape

from .driver import check, driver

KEPT = 256  # maps of a shape: a model of a hundred layers has as many addresses of keys, and of values
_DTYPES = {Dtype.BF16: "BFLOAT16", Dtype.FP16: "FLOAT16", Dtype.FP32: "FLOAT32"}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_L2_PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}


class TensorMaps:
    """The tensor maps of one shape. To encode one takes microseconds, so it is done once an address. Safe to use from several threads.

    Nothing is interleaved, and elements out of bounds are 0.
    """

    __slots__ = ("_arguments", "_cu", "_known", "shape")

    def __init__(self, cu: Any, *shape: Any) -> None:
        """shape: `TensorMapShape.fields`."""
        self._cu, self.shape = cu, shape
        self._known: dict[int, bytes] = {}
        self._arguments: tuple[Any, ...] | None = None

    def at(self, address: int) -> bytes:
        """The map of the tensor at a device address.

        Where the driver refuses it, the call raises DriverError with all that was asked for.
        """
        known = self._known
        encoded = known.get(address)
        if encoded is None:
            encoded = self._encode(address)
            if len(known) >= KEPT:
                for old in list(known)[: KEPT // 2]:
                    known.pop(old, None)
            known[address] = encoded
        return encoded

    def _encode(self, address: int) -> bytes:
        if self._arguments is None:
            cu, (dtype, sizes, strides, box, *of_copies) = self._cu, self.shape
            kind, boxes, steps, options = _constants(cu, dtype, box, *of_copies)
            self._arguments = (kind, len(box)), ([*map(cu.cuuint64_t, sizes)], [*map(cu.cuuint64_t, strides)], boxes, steps, *options)
        before, after = self._arguments
        status, encoded = self._cu.cuTensorMapEncodeTiled(*before, address, *after)
        if status:
            check((status,), f"encoding a tensor map of {TensorMapShape(*self.shape)} at address {address:#x}")
        return ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES)


def tensor_maps_of(shape: TensorMapShape) -> TensorMaps:
    """Those of a shape, kept beyond a launch: k and v often have the same. Of one with `Size`s they are made anew for each."""
    fields = shape.fields
    made: Callable[..., TensorMaps] = _new_maps if has_sizes(fields) else _tensor_maps
    return made(driver(), *fields)


_new_maps = of_sizes(TensorMaps)
_tensor_maps = lru_cache(maxsize=2**10)(TensorMaps)


@cache
def _constants(
    cu: Any, dtype: Dtype, box: tuple[int, ...], swizzle_bytes: int, l2_promotion: int
) -> tuple[Any, list[Any], list[Any], tuple[Any, ...]]:
    """What a kernel's config decides: the driver's element type, the box, steps of 1, and what follows the steps."""
    options = (
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[swizzle_bytes]}"),
        getattr(cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{_L2_PROMOTIONS[l2_promotion]}"),
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return (
        getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_DTYPES[dtype]}"),
        [*map(cu.cuuint32_t, box)],
        [cu.cuuint32_t(1)] * len(box),
        options,
    )


class TensorMapField:
    """One tensor map in a launch's parameters. Nothing is left to do where it is that of `address` already, which the launch looks at."""

    __slots__ = ("_begin", "_maps", "_parameters", "address")

    def __init__(self, parameters: memoryview, begin: int) -> None:
        """`begin`: of the field's bytes among those of the parameters."""
        self._parameters, self._begin = parameters, begin
        self._maps: TensorMaps | None = None
        self.address = -1

    def take_from(self, maps: TensorMaps) -> None:
        """From here on the map is one of these."""
        if maps is not self._maps:
            self._maps, self.address = maps, -1

    def fill(self, address: int) -> None:
        """Makes the field the map of the tensor at `address`. Raises as `TensorMaps.at`, and leaves it as it was then."""
        assert self._maps is not None
        self._parameters[self._begin : self._begin + TENSOR_MAP_BYTES] = self._maps.at(address)
        self.address = address
