"""Planted faults of the backward kernels of FlashAttention-2, each caught on the CPU."""

from __future__ import annotations

import pytest

from flashgen.codegen.families.flash2_backward.config import Flash2BackwardConfig
from flashgen.codegen.problem import Mask
from tests.support import gradient_faults
from tests.support.gradient_faults import GradientFault, GradientSetting
from tests.support.ladder_backward import race_faults, score_faults
from tests.support.plan import planned, to_run
from tests.support.runs import COMPILE_SECONDS

CONFIG = Flash2BackwardConfig(block_q=32, block_kv=64, warps=4)
FULL = GradientSetting(CONFIG, (1, 4, 2, 70, 150), Mask.FULL)
FAULTS = [
    *score_faults(CONFIG),
    *race_faults(CONFIG),
    GradientFault(
        "dQ-stored-not-added",
        "{ add_gradient<kVectors>(at, d); }",
        "{ for (int e = 0; e < 4; ++e) at[lane_index() * 4 + e] = d[e]; }",
        FULL,
    ),
    GradientFault(
        "dQ-added-twice", "{ add_gradient<kVectors>(at, d); }", "{ add_gradient<kVectors>(at, d), add_gradient<kVectors>(at, d); }", FULL
    ),
    GradientFault("dQ-not-added", "{ add_gradient<kVectors>(at, d); }", "{}", FULL),
    GradientFault(
        "dQ-not-from-zero", "float dQ[1][ColumnsDq::kOwn * 2][4] = {};", "float dQ[1][ColumnsDq::kOwn * 2][4] = {{{1.0f}}};", FULL
    ),
    GradientFault(
        "dQ-added-by-one-lane-in-two",
        "red_add_f32_v4(d_q_sum + lane_index() * 4, d);",
        "if (lane_index() % 2) red_add_f32_v4(d_q_sum + lane_index() * 4, d);",
        FULL,
    ),
    GradientFault("keys-of-another-block", "visit_keys(p.key_tiles - 1 - work.tile);", "visit_keys(0);", FULL),
    GradientFault("keys-past-the-last", "visit_keys(p.key_tiles - 1 - work.tile);", "visit_keys(p.key_tiles - work.tile);", FULL),
    GradientFault("one-block-a-head", "TileScheduler::of(p, p.key_tiles)", "TileScheduler::of(p, 1)", FULL),
]


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    gradient_faults.compile_faults(params["fault"] for params in to_run(request))


@pytest.mark.parametrize(
    "fault",
    planned(
        FAULTS,
        1,
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
