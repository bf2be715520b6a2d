"""Planted faults of the backward kernels of FlashAttention-2 in both splits of their warps, each caught on the CPU."""

from __future__ import annotations

import pytest

from flashgen.codegen.families.flash2_backward.config import Flash2BackwardConfig
from flashgen.codegen.ladder import WarpSplit
from flashgen.codegen.problem import Mask
from tests.support import gradient_faults
from tests.support.gradient_faults import OVERWRITE, UNORDERED, GradientFault, GradientSetting
from tests.support.ladder_backward import race_faults, score_faults
from tests.support.plan import planned, to_run
from tests.support.runs import COMPILE_SECONDS

CONFIG = Flash2BackwardConfig(block_q=32, block_kv=64, warps=4)
FULL = GradientSetting(CONFIG, (1, 4, 2, 70, 150), Mask.FULL)
SPLIT = GradientSetting(Flash2BackwardConfig(64, 32, 4, warp_split=WarpSplit.QUERIES), (1, 4, 2, 100, 50), Mask.FULL)
# What warps that divide the queries have of their own: their steps, their rows of dQ, and the sums of dK and dV.
_STEP, _ADD_UP = "first = warp * kStepQ; first < kBlockQ;", "for (int warp = 0; warp < kWarps; ++warp)"
SPLIT_FAULTS = [
    GradientFault("queries-of-the-first-warp", _STEP, "first = 0; first < kBlockQ;", SPLIT),
    GradientFault("all-queries-by-each-warp", f"{_STEP} first += kWarps * kStepQ", "first = 0; first < kBlockQ; first += kStepQ", SPLIT),
    GradientFault("rows-of-dQ-of-another-warp", "row_tile_dq = warp;", "row_tile_dq = warp ^ 1;", SPLIT),
    GradientFault("part-of-the-first-warp-left-out", _ADD_UP, "for (int warp = 1; warp < kWarps; ++warp)", SPLIT),
    GradientFault("part-of-the-last-warp-left-out", _ADD_UP, "for (int warp = 0; warp < kWarps - 1; ++warp)", SPLIT),
    GradientFault("part-of-one-warp-for-all", "own + (warp * kNumbers + n + e) * 128", "own + (n + e) * 128", SPLIT),
    GradientFault("parts-in-one-place", "own + (warp_index() * kNumbers + n) * 128,", "own + n * 128,", SPLIT),
    GradientFault("columns-of-the-first-warp-alone", "n = warp_index() * 2; n", "n = 0; n", SPLIT),
    GradientFault("columns-of-each-pair-swapped", "(warp * kNumbers + n + e) * 128", "(warp * kNumbers + n + 1 - e) * 128", SPLIT),
    GradientFault("rows-from-8-on-in-the-first-rows", " + n / 2 % 2 * 8 + lane_index() / 4;", " + lane_index() / 4;", SPLIT),
    GradientFault("keys-from-16-on-in-the-first-keys", "n / 4 / kTiles * 16 + n / 2 % 2", "n / 2 % 2", SPLIT),
    GradientFault("dK-of-parts-not-scaled", "key_tile, dK, ring, p.scale);", "key_tile, dK, ring, 1.0f);", SPLIT),
    GradientFault("dV-of-parts-scaled", "value_tile, dV, ring, 1.0f);", "value_tile, dV, ring, p.scale);", SPLIT),
    GradientFault("barrier-before-a-warp-reads-its-dS", "barrier_warp_sync();  // dS of this warp", "//", SPLIT, UNORDERED),
    GradientFault("barrier-before-parts-take-the-stages", "barrier_sync();            // nobody reads K and V", "//", SPLIT, OVERWRITE),
    GradientFault("barrier-before-parts-are-added-up", "barrier_sync();  // the parts of all warps", "//", SPLIT, UNORDERED),
    GradientFault("barrier-before-parts-of-dV", "barrier_sync();  // dK is added up", "//", SPLIT, OVERWRITE),
    GradientFault("barrier-before-sums-are-stored", "barrier_sync();  // dK and dV of all warps are here", "//", SPLIT, UNORDERED),
]
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
    *SPLIT_FAULTS,
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
