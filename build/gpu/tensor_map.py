"""Tensor maps in a launch's parameters: 128 bytes each, encoded by the driver once an address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

from flashgen.codegen.parameters import TENSOR_MAP_BYTES
from flashgen.codegen.problem import Dtype
from flashgen.codegen.sizes import has_sizes, of_sizes
from flashgen.codegen.tensor_map import TensorMapShape

from .driver import check, driver

KEPT = 256  # maps of a shape: a model of a hundred layers has as many addresses of keys, and of values
_map_at = (ctypes.c_char * TENSOR_MAP_BYTES).from_address  # its `raw` takes a third of the time of ctypes.string_at
_DTYPES = {Dtype.BF16: "BFLOAT16", Dtype.FP16: "FLOAT16", Dtype.FP32: "FLOAT32"}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_L2_PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}


class _Kind(NamedTuple):
    """What a kernel's config decides of its maps.

    fields: the element type, and what `TensorMapShape` has from the box on
    encode, before, after: the driver's function, and its arguments: the element type and the rank; the box, steps of 1, and what follows
    """

    fields: tuple[Any, ...]
    encode: Callable[..., Any]
    before: tuple[Any, int]
    after: tuple[Any, ...]


class TensorMaps:
    """The tensor maps of one shape. To encode one takes microseconds, so it is done once an address. Safe to use from several threads.

    Nothing is interleaved, and elements out of bounds are 0.
    """

    __slots__ = ("_kind", "_known", "_sizes", "_strides")

    def __init__(self, kind: _Kind, sizes: tuple[Any, ...], strides: tuple[Any, ...]) -> None:
        """sizes, strides: those of `TensorMapShape`, as numbers of the driver's binding."""
        self._kind, self._sizes, self._strides = kind, sizes, strides
        self._known: dict[int, bytes] = {}

    @property
    def shape(self) -> TensorMapShape:
        """All but the address."""
        dtype, *of_copies = self._kind.fields
        return TensorMapShape(dtype, tuple(map(int, self._sizes)), tuple(map(int, self._strides)), *of_copies)

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
        _, encode, before, after = self._kind
        status, encoded = encode(*before, address, self._sizes, self._strides, *after)
        if status:
            check((status,), f"encoding a tensor map of {self.shape} at address {address:#x}")
        return _map_at(encoded.getPtr()).raw


def tensor_maps_of(shape: TensorMapShape) -> TensorMaps:
    """Those of a shape, kept beyond a launch: k and v often have the same. Of one with `Size`s they are made anew for each."""
    if has_sizes(shape.fields):
        return _new_maps(driver(), *shape.fields)
    return _kept_maps(driver(), *shape.fields)


def _new_maps(cu: Any, dtype: Dtype, sizes: tuple[int, ...], strides: tuple[int, ...], *of_copies: Any) -> TensorMaps:
    """An object of the binding takes longer to make than a map to encode: a function of sizes makes those of `Size`s alone."""
    number = of_sizes(cu.cuuint64_t)
    made: TensorMaps = of_sizes(TensorMaps)(_kind(cu, dtype, *of_copies), tuple(map(number, sizes)), tuple(map(number, strides)))
    return made


_kept_maps = lru_cache(maxsize=2**10)(_new_maps)


@of_sizes
@cache
def _kind(cu: Any, dtype: Dtype, box: tuple[int, ...], swizzle_bytes: int, l2_promotion: int) -> _Kind:
    options = (
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[swizzle_bytes]}"),
        getattr(cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{_L2_PROMOTIONS[l2_promotion]}"),
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    element = getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_DTYPES[dtype]}")
    boxes = [*map(cu.cuuint32_t, box)], [cu.cuuint32_t(1)] * len(box)
    return _Kind((dtype, box, swizzle_bytes, l2_promotion), cu.cuTensorMapEncodeTiled, (element, len(box)), (*boxes, *options))


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
