"""Tensor maps: the driver's rules, maps encoded once a shape and address, and their bytes on the CPU."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from flashgen.build.emulator.tensor_map import emulated_map
from flashgen.build.gpu.driver import DriverError
from flashgen.build.gpu.tensor_map import KEPT, TensorMapField, TensorMaps
from flashgen.build.parameter_buffer import parameter_buffer
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype
from flashgen.codegen.tensor_map import TensorMapShape

GOOD: dict[str, Any] = {
    "dtype": Dtype.BF16,
    "sizes": (128, 1000, 16, 4),
    "strides": (4096, 256, 4096000),
    "box": (64, 128, 1, 1),
    "swizzle_bytes": 128,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sizes": (2**32, 2**32, 1, 1)},
        {"strides": (0, 16, 2**40 - 16)},
        {"box": (64, 256, 256, 256)},
        {"box": (32, 8, 1, 1), "swizzle_bytes": 64},
        {"box": (16, 8, 1, 1), "swizzle_bytes": 32},
        {"box": (256, 8, 1, 1), "swizzle_bytes": 0},
        {"sizes": (8, 8), "strides": (16,), "box": (8, 8)},
        {"sizes": (8,) * 5, "strides": (16,) * 4, "box": (8,) * 5},
    ],
)
def test_what_the_driver_allows(changes: dict[str, Any]) -> None:
    TensorMapShape(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": (), "strides": (), "box": ()}, r"^sizes must be of 2 to 5 dimensions; got 0$"),
        ({"sizes": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, r"^sizes must be of 2 to 5 dimensions; got 6$"),
        ({"strides": (16, 16)}, r"^strides must have 3 entries for 4 sizes; got 2$"),
        ({"strides": (16,) * 4}, r"^strides must have 3 entries for 4 sizes; got 4$"),
        ({"box": (64, 8, 1, 1, 1)}, r"^box must have 4 entries for 4 sizes; got 5$"),
        ({"box": (64,)}, r"^box must have 4 entries for 4 sizes; got 1$"),
        ({"sizes": (128, 0, 16, 4)}, r"^sizes\[1\] must be an integer from 1 to 4294967296; got 0$"),
        ({"sizes": (2**32 + 1, 1, 1, 1)}, r"^sizes\[0\] must be an integer from 1 to 4294967296; got 4294967297$"),
        ({"strides": (4096, 264, 4096000)}, r"^strides\[1\] must be a multiple of 16 bytes; got 264$"),
        ({"strides": (4096, 256, 2**40)}, r"^strides\[2\] must be an integer from 0 to 1099511627775; got 1099511627776$"),
        ({"strides": (-16, 256, 16)}, r"^strides\[0\] must be an integer from 0 to .*; got -16$"),
        ({"box": (64, 257, 1, 1)}, r"^box\[1\] must be an integer from 1 to 256; got 257$"),
        ({"box": (64, 128, 0, 1)}, r"^box\[2\] must be an integer from 1 to 256; got 0$"),
        ({"box": (60, 128, 1, 1)}, r"^box\[0\] must be a multiple of 16 bytes; got 60 elements, 120 bytes$"),
        ({"box": (72, 128, 1, 1)}, r"^box\[0\] must fit swizzle_bytes 128; got 72 elements, 144 bytes$"),
        ({"swizzle_bytes": 64}, r"^box\[0\] must fit swizzle_bytes 64; got 64 elements, 128 bytes$"),
        ({"swizzle_bytes": 96}, r"^swizzle_bytes must be one of 0, 32, 64, 128; got 96$"),
        ({"l2_promotion": 32}, r"^l2_promotion must be one of 0, 64, 128, 256; got 32$"),
    ],
)
def test_what_the_driver_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TensorMapShape(**{**GOOD, **changes})


class Encodings(TensorMaps):
    """Maps without a driver: each is its address, over and over. Refuses `bad`."""

    def __init__(self, bad: int = 0) -> None:
        super().__init__(None, (), ())  # type: ignore[arg-type]
        self.asked: list[int] = []
        self.bad = bad

    def _encode(self, address: int) -> bytes:
        self.asked.append(address)
        if address == self.bad:
            raise DriverError("refused")
        return map_of(address)


def map_of(address: int) -> bytes:
    return address.to_bytes(8, "little") * 16


def test_a_map_is_encoded_once_an_address() -> None:
    maps = Encodings()
    for address in (7, 9, 7, 7, 9):
        assert maps.at(address) == map_of(address)
    assert maps.asked == [7, 9]


def test_so_many_maps_of_a_shape_are_kept_and_the_oldest_half_is_dropped() -> None:
    maps = Encodings()
    for address in range(1, KEPT + 1):
        maps.at(address)
    maps.at(1)
    assert maps.asked == list(range(1, KEPT + 1)), "so many are kept"
    maps.at(KEPT + 1)
    for address in (KEPT // 2 + 1, KEPT, KEPT + 1):
        maps.at(address)
    assert len(maps.asked) == KEPT + 1, "the newer half is still there"
    maps.at(KEPT // 2)
    assert maps.asked[-1] == KEPT // 2, "the older half is not"


def test_a_field_has_the_map_of_its_last_address_and_shape() -> None:
    parameters, maps, others = bytearray(b"\xff" * 384), Encodings(), Encodings()
    field = TensorMapField(memoryview(parameters), 128)
    field.take_from(maps)
    for address in (7, 9, 7):
        field.fill(address)
        assert field.address == address
        assert parameters == b"\xff" * 128 + map_of(address) + b"\xff" * 128
    field.take_from(maps)
    assert field.address == 7, "nothing has changed"
    field.take_from(others)
    assert field.address != 7, "the map of that address is of another shape"
    field.fill(7)
    assert (maps.asked, others.asked) == ([7, 9], [7])


def test_a_refused_address_leaves_the_field_and_is_asked_for_again() -> None:
    parameters, maps = bytearray(128), Encodings(bad=13)
    field = TensorMapField(memoryview(parameters), 0)
    field.take_from(maps)
    field.fill(7)
    for _ in range(2):
        with pytest.raises(DriverError):
            field.fill(13)
        assert field.address == 7
        assert parameters == map_of(7)
    assert maps.asked == [7, 13, 13]


def test_the_parameters_of_a_launch_are_aligned() -> None:
    buffers = [parameter_buffer(bytes([size % 256]) * size) for size in range(8, 400, 8)]
    assert all(ctypes.addressof(buffer) % 64 == 0 for buffer in buffers)
    assert [buffer.raw for buffer in buffers] == [bytes([size % 256]) * size for size in range(8, 400, 8)]


def test_a_map_on_the_cpu_has_the_bytes_that_are_written_down() -> None:
    shape = TensorMapShape(Dtype.FP16, (64, 2**32 - 1, 3), (128, 2**40 - 16), (32, 256, 1), 64)
    expected = struct.pack("<Q4Q5I5H3B55x", 2**47 + 16, 128, 2**40 - 16, 0, 0, 64, 2**32 - 1, 3, 0, 0, 32, 256, 1, 0, 0, 3, 2, 64)
    assert emulated_map(shape, 2**47 + 16) == expected
    assert len(expected) == 128
    with pytest.raises(ArgumentError, match=r"^sizes must be below 2\^32 on the CPU; got \(64, 4294967296\)$"):
        emulated_map(TensorMapShape(Dtype.FP16, (64, 2**32), (128,), (32, 8), 64), 0)
