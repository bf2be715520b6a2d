"""The scale as kernels take it: every value allowed gives finite factors, and the values just beyond do not."""

from __future__ import annotations

import math
import struct

import pytest

from flashgen.codegen.attention import MAX_SCALE, MIN_SCALE, float32, scale_values
from flashgen.codegen.errors import ArgumentError


@pytest.mark.parametrize("scale", [MIN_SCALE, 1e-30, 0.125, 1, 1e30, MAX_SCALE])
def test_an_allowed_scale_has_normal_and_finite_factors(scale: float) -> None:
    scale_log2, ln2_hi, ln2_lo = (scale_values(scale)[name] for name in ("scale_log2", "ln2_hi", "ln2_lo"))
    assert float32(scale) >= 2.0**-126
    assert math.isfinite(scale_log2)
    assert scale_log2 >= 2.0**-126
    assert scale_log2 == pytest.approx(scale * math.log2(math.e), rel=1e-6)
    assert ln2_hi == pytest.approx(math.log(2), rel=1e-6)
    assert abs(ln2_lo) < 1e-7


def next_fp32(value: float, step: int) -> float:
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<i", bits + step))[0])


def test_the_bounds_are_the_outermost_fp32_numbers_that_will_do() -> None:
    assert next_fp32(MIN_SCALE, -1) < 2.0**-126
    with pytest.raises(OverflowError):
        struct.pack("<f", next_fp32(MAX_SCALE, 1) * math.log2(math.e))
    for beyond in (next_fp32(MIN_SCALE, -1), next_fp32(MAX_SCALE, 1), 0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ArgumentError, match=r"^scale must be from "):
            scale_values(beyond)
