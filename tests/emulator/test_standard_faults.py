"""Planted faults of standard attention, each caught on the CPU: by the numerics rule, or by the emulator's checks."""

from __future__ import annotations

from functools import partial

import pytest

from flashgen.codegen.families.standard_attention.config import StandardAttentionConfig
from flashgen.codegen.problem import Dtype, Mask
from tests.support.cases import Layout
from tests.support.caught import IN_FLIGHT, NOT_WRITTEN, OVERWRITE, TWICE, caught_by, compile_planted, listed
from tests.support.fault import Fault, setting

# A block of the softmax has 4 warps, which hold 512 scores: 300 keys take all of them, 100 take one, and 1000 take two slices.
CONFIG = StandardAttentionConfig(block_q=64, block_kv=64, warps=4, stages=2, softmax_warps=4, row_scores=4)
given = partial(setting, config=CONFIG, batch=1)

FULL = given((70, 300), (65, 100))
CAUSAL = given((200, 300), mask=Mask.CAUSAL)
LONG = given((70, 1000))
TAIL = given((70, 129))
UNSEEN = given((200, 50), mask=Mask.CAUSAL)
# The next 16 bytes behind a tensor's row are no zeros.
PADDED = given((70, 200), width=(72, 72), layout=Layout.PADDED)
# Scores differ by more than an exponent of fp32 holds.
LARGE = given((70, 300), magnitude=64.0)
LARGE_AND_LONG = given((70, 600), magnitude=64.0)
# Rounding a scaled maximum is worth more than an exponent's range.
HUGE = given((70, 300), dtype=Dtype.BF16, magnitude=1e12)
# Key 128 is seen by query 63 alone, the last of its block, and begins a tile.
EDGE = given((64, 129), mask=Mask.CAUSAL)
# The output of a warp takes the place of rows of P that other warps read.
WIDE = given((70, 300), width=(64, 128))

SCORES = [
    Fault("scores-of-a-wrong-key-head", "of_k, batch, head_kv,", "of_k, batch, work.head % divide(p.heads_q, p.group_reciprocal),", FULL),
    Fault(
        "scores-in-the-wrong-rows",
        "p.S, of_scores, batch, work.head, first_query + first_row",
        "p.S, of_scores, batch, work.head, first_query + (first_row ^ 16)",
        FULL,
    ),
    Fault("scores-of-the-tile-before", "k + first_key * p.k_row", "k + max(0, first_key - kBlockKv) * p.k_row", FULL),
    Fault("neighbours-trade-the-wrong-pair", "uint4{got[0], got[1], kept[0]", "uint4{got[1], got[0], kept[0]", FULL),
    Fault("scores-in-bf16", "= __uint_as_float(four.x);", "= __uint_as_float(four.x & 0xffff0000u);", FULL),
    Fault("last-key-of-a-block-not-visited", "keys(first_query + kBlockQ - 1);", "keys(first_query + kBlockQ - 2);", EDGE),
]
SOFTMAX = [
    Fault("mask-one-key-too-many", "query + 1 + p.len_kv - p.len_q", "query + 2 + p.len_kv - p.len_q", CAUSAL),
    Fault("mask-one-key-too-few", "query + 1 + p.len_kv - p.len_q", "query + p.len_kv - p.len_q", CAUSAL),
    Fault("mask-aligned-top-left", "query + 1 + p.len_kv - p.len_q", "query + 1", CAUSAL),
    Fault("softmax-over-the-padded-row-end", "column + e >= visible)", "column + e > visible)", TAIL),
    Fault("query-of-the-first-head", "row - divide(row, p.len_q_reciprocal) * p.len_q", "min(row, p.len_q - 1)", CAUSAL),
    Fault("wrong-row-of-S", "p.S + row * p.score_row", "p.S + row / 2 * 2 * p.score_row", FULL),
    Fault("maximum-not-subtracted", "row_max == -infinity() ? Origin{} :", "true ? Origin{} :", LARGE),
    Fault("maximum-subtracted-after-scaling", "constexpr float kHuge = 0x1p13f;", "constexpr float kHuge = 0x1p120f;", HUGE),
    Fault("maximum-of-a-row-without-keys", "row_max == -infinity() ? Origin{} :", "false ? Origin{} :", UNSEEN),
    Fault("maximum-of-the-last-slice", "row_max = fmaxf(row_max, slice.maximum());", "row_max = slice.maximum();", LARGE_AND_LONG),
    Fault("scale-not-applied", "fmaf(x[i][e] - origin.shift, scale_log2,", "fmaf(x[i][e] - origin.shift, 1.0f,", FULL),
    Fault("sum-of-the-last-slice", "row_sum += slice.row_sum();", "row_sum = slice.row_sum();", LONG),
    Fault("sum-of-one-warp", "if (row_warps == 1) return value;", "return value;", FULL),
    Fault("sum-of-half-the-lanes", "for (int distance = 16;", "for (int distance = 8;", FULL),
    Fault("P-not-divided", "width - first, inverse)", "width - first, 1.0f)", FULL),
    Fault("P-not-zero-where-nothing-is-seen", "width - first, inverse)", "visible - first, inverse)", CAUSAL),
    Fault(
        "P-of-the-last-slice",
        "slice.load(S + first, visible - first);\n            slice.exponentiate(origin, p.scale_log2);\n",
        "",
        LONG,
    ),
    Fault("lse-base-2", "p.lse[row] = log_sum_exp(", "p.lse[row] = 1.442695f * log_sum_exp(", FULL),
    Fault("lse-of-another-row", "p.lse[row] =", "p.lse[row ^ 1] =", FULL),
]
OUTPUT = [
    Fault("last-key-tile-skipped", "p.len_q, p.len_kv), ring,", "p.len_q, p.len_kv) - 1, ring,", FULL),
    Fault("output-of-a-wrong-value-head", "of_v, batch, head_kv,", "of_v, batch, work.head % divide(p.heads_q, p.group_reciprocal),", FULL),
    Fault("P-of-the-first-query-tile", "p.P, of_scores, batch, work.head, first_query", "p.P, of_scores, batch, work.head, 0", FULL),
    Fault("values-one-row-off", "v + first_key * p.v_row", "v + max(0, first_key - 1) * p.v_row", FULL),
    Fault("values-behind-the-end", "v + first_key * p.v_row, p.v_row, keys,", "v + first_key * p.v_row, p.v_row, kBlockKv,", PADDED),
    Fault(
        "truncating-conversion",
        "cvt.rn.f16x2.f32",
        "cvt.rz.f16x2.f32",
        given((150, 300), magnitude=1.0, offset=1500.0),
        on_cpu=("+ 0xfffu + (bits >> 13 & 1);", ";"),
    ),
]
_TILE_BARRIER = "barrier_sync();  // every thread's copies of this tile have landed"
_OUTPUT_BARRIER = "barrier_sync();  // nobody reads the stages any more"
_ROW_BARRIER = "barrier_sync();\n    const SharedAddress of_row"
_WAIT = "cp_async_wait_group<kStages - 2>();"
# Each with the check that catches it.
RACES = {
    IN_FLIGHT: [
        Fault("wait-removed", _WAIT, "", FULL),
        Fault("wait-one-group-short", _WAIT, "cp_async_wait_group<kStages - 1>();", FULL),
    ],
    OVERWRITE: [
        Fault("barrier-before-the-output", _OUTPUT_BARRIER, "//", WIDE),
        Fault("maxima-and-sums-in-one-place", "row_sum, sums,", "row_sum, maxima,", FULL),
    ],
    TWICE: [Fault("output-in-the-place-of-another-warp", "OutTile{ring + warp_index() * OutTile::kBytes}", "OutTile{ring}", FULL)],
    NOT_WRITTEN: [
        Fault("barrier-before-a-tile", _TILE_BARRIER, "//", FULL),
        Fault("barrier-before-the-warps-of-a-row", _ROW_BARRIER, "const SharedAddress of_row", FULL),
    ],
}
FAULTS = [*SCORES, *SOFTMAX, *OUTPUT, *(fault for faults in RACES.values() for fault in faults)]
PARTS = {fault.name: part for part, faults in enumerate((SCORES, SOFTMAX, OUTPUT)) for fault in faults}
QUICK, QUICK_RACES = 1, 0  # for every run; --slow has all


def of_part(fault: Fault) -> list[object]:
    return [PARTS.get(fault.name)]


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_planted(request)


@pytest.mark.parametrize("fault", listed([*SCORES, *SOFTMAX, *OUTPUT], QUICK, of_part))
def test_caught(fault: Fault) -> None:
    assert caught_by(fault), f"fault {fault.name} was accepted"


@pytest.mark.parametrize("fault", listed(FAULTS[-sum(map(len, RACES.values())) :], QUICK_RACES, of_part))
def test_a_race_is_caught_by_the_check_for_it(fault: Fault) -> None:
    (check,) = (check for check, faults in RACES.items() if fault in faults)
    caught = caught_by(fault)
    assert caught.startswith("shared memory: ")
    assert check in caught


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
