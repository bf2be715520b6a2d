"""Planted faults of the generic backward kernels, each caught on the CPU: by the numerics rule, or by the emulator's checks."""

from __future__ import annotations

from functools import partial

import pytest

from flashgen.codegen.families.attention_backward.config import AttentionBackwardConfig
from flashgen.codegen.problem import Mask
from tests.support import gradient_faults
from tests.support.gradient_faults import IN_FLIGHT, OVERWRITE, UNORDERED, GradientFault, GradientSetting
from tests.support.plan import planned, to_run
from tests.support.runs import COMPILE_SECONDS

ONE_STAGE, TWO_STAGES = AttentionBackwardConfig(64, 64, 32, 4, 1, 16, 1), AttentionBackwardConfig(64, 64, 32, 4, 1, 16, 2)
SHARED_KEYS = AttentionBackwardConfig(64, 64, 32, 4, 2, 16, 1)  # by two warps
given = partial(GradientSetting, ONE_STAGE)
CAUSAL, FULL = given((1, 4, 2, 130, 150)), given((1, 4, 2, 130, 150), Mask.FULL)
TWO = GradientSetting(TWO_STAGES, (1, 2, 1, 200, 100))
SHARED = GradientSetting(SHARED_KEYS, (1, 2, 1, 130, 100))
HUGE = given(gradient_faults.HUGE, special=True)
FAR = given(gradient_faults.FAR, special=True)
FEW_KEYS = given((1, 2, 1, 70, 6))
PEAKED = given((1, 2, 1, 130, 6), peaked=True)

ROWS = [
    GradientFault("delta-of-another-row", "row_delta[row] = exists", "row_delta[row ^ 1] = exists", CAUSAL),
    GradientFault("delta-without-d-lse", "product - (d_lse == nullptr ? 0.0f : d_lse[row])", "product", CAUSAL),
    GradientFault(
        "delta-of-half-the-lanes", "for (int distance = 1; distance < kRowLanes;", "for (int distance = 2; distance < kRowLanes;", CAUSAL
    ),
    GradientFault("lse-not-in-base-2", "infinity() : lse * 1.44269504f", "infinity() : lse", CAUSAL),
    GradientFault("row-without-keys-not-hidden", "lse == -infinity() ? infinity() :", "false ? infinity() :", given((1, 2, 1, 130, 50))),
    GradientFault(
        "sums-not-zeroed",
        "write_zeros<kThreads, kBlockQ * kColumns>(",
        "if (false) write_zeros<kThreads, kBlockQ * kColumns>(",
        CAUSAL,
    ),
    GradientFault(
        "half-of-the-sums-zeroed",
        "for (int i = thread_index() * 4; i < kCount;",
        "for (int i = thread_index() * 4; i < kCount / 2;",
        CAUSAL,
    ),
    GradientFault("huge-rows-not-told", "p.huge_tiles[tile] = huge;", "p.huge_tiles[tile] = 0;", HUGE),
    GradientFault(
        "huge-rows-not-summed-again", "if (huge_row) row_lse[row] = log_sum_exp(", "if (false) row_lse[row] = log_sum_exp(", HUGE
    ),
    GradientFault("shift-of-another-row", "row_shift[row] = huge_row ?", "row_shift[row ^ 1] = huge_row ?", HUGE),
    GradientFault("ordinary-rows-shifted", "row_shift[row] = huge_row ? own.maximum : 0.0f;", "row_shift[row] = own.maximum;", HUGE),
    GradientFault("few-keys-not-gone-through", "huge || len_kv <= kFewKeys", "huge", PEAKED),
    GradientFault("exact-delta-of-another-row", "row_delta[row] = own.d_p", "row_delta[row ^ 1] = own.d_p", FEW_KEYS),
    GradientFault("exact-delta-not-normalised", "own.d_p * normaliser(own.row_sum)", "own.d_p", FEW_KEYS),
    GradientFault("exact-delta-without-d-lse", "(p.d_lse == nullptr ? 0.0f : p.d_lse[index])", "0.0f", FEW_KEYS),
    GradientFault("keys-unseen-in-exact-delta", "if (chain.visible(query + e % 2, first_key + lane", "if (true || (lane", FEW_KEYS),
    GradientFault("maximum-not-followed-in-exact-delta", "d_p * own + other.d_p * others}", "d_p + other.d_p}", PEAKED),
    GradientFault("columns-of-another-lane", "(upper ? low : high) = other;", "(upper ? high : low) = other;", FEW_KEYS),
]
GRADIENTS = [
    GradientFault("mask-one-key-too-many", "return key <= query + causal_offset;", "return key <= query + causal_offset + 1;", CAUSAL),
    GradientFault("mask-one-key-too-few", "return key <= query + causal_offset;", "return key < query + causal_offset;", CAUSAL),
    GradientFault("keys-past-the-end-seen", "return key < len_kv;", "return true;", given((1, 1, 1, 130, 70), Mask.FULL, lowered=True)),
    GradientFault("query-tile-skipped", "return {all.begin / kBlockQ,", "return {all.begin / kBlockQ + 1,", CAUSAL),
    GradientFault("last-query-tile-skipped", "(all.end + kBlockQ - 1) / kBlockQ}", "all.end / kBlockQ}", CAUSAL),
    GradientFault("crossed-tile-not-masked", "(all.full_begin + kBlockQ - 1) / kBlockQ,", "all.full_begin / kBlockQ,", CAUSAL),
    GradientFault("scale-not-applied", "ex2_approx_ftz(fmaf(s[i][j][e], scale_log2,", "ex2_approx_ftz(fmaf(s[i][j][e], 1.0f,", FULL),
    GradientFault("lse-of-the-other-query", "scale_log2, -lse[e % 2])", "scale_log2, -lse[0])", FULL),
    GradientFault("stale-delta", "(dp[i][j][e] - delta[e % 2])", "(dp[i][j][e] - delta[0])", FULL),
    GradientFault(
        "delta-of-the-first-step", "differentiate(dP, S, here.row_delta() + first * 4);", "differentiate(dP, S, here.row_delta());", FULL
    ),
    GradientFault("dS-without-P", "= P[i][j][e] * (dp", "= (dp", FULL),
    GradientFault(
        "dK-not-scaled",
        "store_columns<Element>(key_tile, first_row, dK, p.scale,",
        "store_columns<Element>(key_tile, first_row, dK, 1.0f,",
        FULL,
    ),
    GradientFault("dV-scaled", "first_row, dV, 1.0f,", "first_row, dV, p.scale,", FULL),
    GradientFault("dK-of-the-wrong-head", "batch(batch), head(head_kv * p.group)", "batch(batch), head(head_kv)", FULL),
    GradientFault(
        "dK-of-one-head-of-the-group",
        "if (++tile == tiles.end) tile = tiles.begin, ++head;\n    }\n};",
        "if (++tile == tiles.end) tile = tiles.begin;\n    }\n};",
        FULL,
    ),
    GradientFault(
        "dQ-of-the-wrong-head",
        "if (++tile == tiles.end) tile = tiles.begin, ++head;\n    }\n\n",
        "if (++tile == tiles.end) tile = tiles.begin;\n    }\n\n",
        FULL,
    ),
    GradientFault("dQ-of-the-wrong-rows", "row_tile_dq, dQ, query_columns);", "row_tile_dq ^ 1, dQ, query_columns);", FULL),
    GradientFault(
        "dQ-added-twice",
        "red_add_f32_v4(d_q_sum + lane_index() * 4, d);",
        "for (int i = 0; i < 2; ++i) red_add_f32_v4(d_q_sum + lane_index() * 4, d);",
        FULL,
    ),
    GradientFault(
        "keys-of-dQ-left-out",
        "slice < ScoreTile::kRowCount / 16;",
        "slice < ScoreTile::kRowCount / 32;",
        FULL,
    ),
    GradientFault("huge-scores-not-shifted", "if (unlikely(huge)) shift_transposed(", "if (false) shift_transposed(", HUGE),
    GradientFault(
        "rows-32-bits",
        "batch * strides.batch + head * strides.head + row * strides.row;\n    }\n    template",
        "static_cast<int>(batch * strides.batch + head * strides.head + row * strides.row);\n    }\n    template",
        FAR,
    ),
]
SUMS = [
    GradientFault("dQ-not-scaled", "__uint_as_float(bits[e]) * scale;", "__uint_as_float(bits[e]);", FULL),
    GradientFault(
        "dQ-added-in-another-order-than-read",
        "gradient_offset<kColumns>(row_tile + i, columns.pair(j / 2) * 2 + j % 2)",
        "gradient_offset<kColumns>(row_tile + i, columns.pair(j / 2) * 2 + 1 - j % 2)",
        FULL,
    ),
    GradientFault("dQ-of-another-warp", "gradient_offset<kColumns>(warp, j)", "gradient_offset<kColumns>(warp ^ 1, j)", FULL),
]
_FIRST_BARRIER = "barrier_sync();  // Q and dO of this tile are here"
_SECOND_BARRIER = "barrier_sync();  // dS of all warps is here"
_WAIT = "        cp_async_wait_group<0>();\n        barrier_sync();  // Q and dO"
RACES = [
    GradientFault("barrier-before-dS-is-read", _SECOND_BARRIER, "//", CAUSAL, UNORDERED),
    GradientFault("barrier-before-a-tile-is-used", _FIRST_BARRIER, "//", TWO, IN_FLIGHT),
    GradientFault("wait-for-Q-and-dO", _WAIT, "        barrier_sync();  // Q and dO", CAUSAL, IN_FLIGHT),
    GradientFault("barrier-before-a-stage-is-loaded", "if (kStages == 1) barrier_sync();", "", SHARED, OVERWRITE),
    GradientFault("stage-in-use-loaded", "stage.base = stages.base + Stage::kBytes - (stage.base - stages.base);", "", TWO, IN_FLIGHT),
    GradientFault("barrier-before-dK-takes-the-place-of-K", "barrier_sync();  // nobody reads K and V", "//", FULL, OVERWRITE),
    GradientFault("barrier-before-dK-is-stored", "value_columns);\n    barrier_sync();", "value_columns);", FULL, UNORDERED),
]
BY_KERNEL = {"_preprocess": ROWS, "": [*GRADIENTS, *RACES], "_postprocess": SUMS}
FAULTS = [fault for faults in BY_KERNEL.values() for fault in faults]


KERNEL_OF = {fault: suffix for suffix, faults in BY_KERNEL.items() for fault in faults}


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    gradient_faults.compile_faults(params["fault"] for params in to_run(request))


@pytest.mark.parametrize(
    "fault",
    planned(
        FAULTS,
        1,
        family=lambda fault: fault.setting.spec.family.name,
        kinds=lambda fault: (KERNEL_OF[fault], fault.check),
        name=lambda fault: fault.name,
        seconds=lambda fault: 1.5 * COMPILE_SECONDS,
        fault=True,
    ),
)
def test_caught(fault: GradientFault) -> None:
    fault.require_caught()


def test_names_are_unique() -> None:
    gradient_faults.require_own_names(FAULTS)
