"""Planted faults of the backward kernels of FlashAttention's first version, each caught on the CPU."""

from __future__ import annotations

import pytest

from flashgen.codegen.families.flash1_backward.config import Flash1BackwardConfig
from flashgen.codegen.problem import Mask
from tests.support import gradient_faults
from tests.support.gradient_faults import GradientFault, GradientSetting
from tests.support.ladder_backward import key_faults, race_faults
from tests.support.plan import planned, to_run
from tests.support.runs import COMPILE_SECONDS

CONFIG = Flash1BackwardConfig(block_q=32, block_kv=64, warps=4)
FULL = GradientSetting(CONFIG, (1, 4, 2, 70, 150), Mask.FULL)
CAUSAL = GradientSetting(CONFIG, (1, 4, 2, 100, 150))
_LOAD = "[](float (&d)[4], float* at) { "
_EACH = "row_tile_dq, query_columns, "
FAULTS = [
    *key_faults(CONFIG),
    *race_faults(CONFIG),
    GradientFault(
        "dQ-stored-without-the-load", _LOAD + "load_gradient<kVectors>(d, at, 1.0f); }", _LOAD + "d[0] = d[1] = d[2] = d[3] = 0; }", FULL
    ),
    GradientFault("dQ-not-stored", "store_gradient(at, d); }", "}", FULL),
    GradientFault("dQ-loaded-scaled", "load_gradient<kVectors>(d, at, 1.0f); }", "load_gradient<kVectors>(d, at, 0.5f); }", FULL),
    GradientFault(
        "dQ-loaded-of-the-tile-before",
        _EACH + "[](float (&d)[4], float* at) { load",
        _EACH + "[](float (&d)[4], float* at) { at -= kBlockQ * kColumns; load",
        CAUSAL,
    ),
    GradientFault(
        "dQ-stored-by-one-lane-in-two",
        "*reinterpret_cast<uint4*>(d_q_sum + lane_index() * 4) = four;",
        "if (lane_index() % 2) *reinterpret_cast<uint4*>(d_q_sum + lane_index() * 4) = four;",
        FULL,
    ),
    GradientFault(
        "numbers-of-dQ-swapped", "__float_as_uint(d[2]), __float_as_uint(d[3])}", "__float_as_uint(d[3]), __float_as_uint(d[2])}", FULL
    ),
    GradientFault("first-keys-skipped", "for (int index = 0; index < p.key_tiles;", "for (int index = 1; index < p.key_tiles;", FULL),
    GradientFault("last-keys-skipped", "index < p.key_tiles; ++index", "index < p.key_tiles - 1; ++index", FULL),
]


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    gradient_faults.compile_faults(params["fault"] for params in to_run(request))


@pytest.mark.parametrize(
    "fault",
    planned(
        FAULTS,
        0,  # every run has faults of the family whose parts these share
        family=lambda fault: fault.setting.spec.family.name,
        kinds=lambda fault: (fault.check,),
        name=lambda fault: fault.name,
        seconds=lambda fault: COMPILE_SECONDS / 2,  # of few lines, two at a time
        fault=True,
    ),
)
def test_caught(fault: GradientFault) -> None:
    fault.require_caught()


def test_names_are_unique() -> None:
    gradient_faults.require_own_names(FAULTS)
