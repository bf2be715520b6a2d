"""Planted faults of memory-efficient attention, each caught on the CPU: by the numerics rule, or by the emulator's checks."""

from __future__ import annotations

from functools import partial

import pytest

from flashgen.codegen.families.memory_efficient_attention.config import MemoryEfficientAttentionConfig
from flashgen.codegen.problem import Dtype, Mask
from tests.support import caught, ladder
from tests.support.cases import Layout
from tests.support.fault import Fault, setting

given = partial(setting, config=MemoryEfficientAttentionConfig(block_q=64, block_kv=32, warps=4), batch=1)
FULL = given((70, 150))
CAUSAL = given((150, 200), mask=Mask.CAUSAL)
# Key 64 is seen by query 63 alone, the last of its block, and begins a tile.
EDGE = given((64, 65), mask=Mask.CAUSAL)
PADDED = given((70, 100), width=(72, 72), layout=Layout.PADDED)  # the next 16 bytes behind a tensor's row are no zeros
RISING = given((70, 300), magnitude=64.0)  # scores differ by more than an exponent of fp32 holds
HUGE = given((70, 150), dtype=Dtype.BF16, magnitude=1e12)  # rounding a scaled maximum is worth more than an exponent's range
HUGE_FIRST = given((70, 150), rising=20000.0)  # no row is huge after the first key tiles
UNSEEN = given((200, 50), mask=Mask.CAUSAL)
WIDE = given((70, 150), width=(32, 128))  # the output of a warp takes the place of rows of Q that other warps read
NOTHING = given((70, 0), width=(32, 128))  # without keys nobody waits for Q

_PASSES = "    barrier_sync();  // nobody reads the keys of the first pass any more\n"
_FIRST, _SECOND = "ring, kKeyBytes, load_keys", "ring, kKeyBytes, load_keys_and_values"
FAULTS = ladder.Faults(
    wrong=[
        Fault("keys-of-a-wrong-head", "p.k_row}, batch, head_kv,", f"p.k_row}}, batch, {ladder.WRONG_HEAD},", FULL),
        Fault(
            "values-of-a-wrong-head",
            "p.v_row}, batch, head_kv,",
            f"p.v_row}}, batch, {ladder.WRONG_HEAD},",
            FULL,
        ),
        Fault("mask-one-key-too-many", "return {0, query + causal_offset + 1};", "return {0, query + causal_offset + 2};", CAUSAL),
        Fault("mask-one-key-too-few", "return {0, query + causal_offset + 1};", "return {0, query + causal_offset};", CAUSAL),
        Fault("mask-aligned-top-left", "{len_kv - len_q}};", "{0}};", CAUSAL),
        Fault("last-key-of-a-block-not-visited", "keys(first_query + kBlockQ - 1);", "keys(first_query + kBlockQ - 2);", EDGE),
        Fault(
            "last-tile-of-the-first-pass-skipped",
            "seen.end, ring, kKeyBytes, load_keys,",
            "seen.end - 1, ring, kKeyBytes, load_keys,",
            FULL,
        ),
        Fault("second-pass-without-the-last-tile", f"seen.end, {_SECOND},", f"seen.end - 1, {_SECOND},", FULL),
        Fault(
            "stale-row-max",
            "fmaxf(before, mul_rn(maximum[i][h], scale_log2));",
            "before == kInitialRowMax ? maximum[i][h] * scale_log2 : before;",
            RISING,
        ),
        Fault("sum-not-rescaled", "rows.row_sum[i][h] *= factor_of_sum;", "", FULL),
        Fault("sum-of-one-lane", "kSumsOfLanes ? quad_sum(row_sum[i][h] + compensation[i][h]) :", "", FULL),
        Fault("sum-of-the-last-tile", "before = row_sum[i][h], added", "before = 0.0f, added", FULL),
        Fault("P-not-normalised", "move_origins_to_lse(rows, factor);", "", FULL),
        Fault("lse-in-base-2-as-the-origin", "{1.0f, 0.0f}) * 1.44269504f;", "{1.0f, 0.0f});", FULL),
        Fault("lse-base-2", "const float lse = lse_of_lane<kRowTiles>(", "const float lse = 1.442695f * lse_of_lane<kRowTiles>(", FULL),
        Fault(
            "lse-of-another-row",
            "if (own < kRowTiles * 2 && row < rows_valid) lse[row]",
            "if (own < kRowTiles * 2 && row < rows_valid) lse[row ^ 1]",
            FULL,
        ),
        Fault("huge-rows-forgotten", "rows.origin[i][h].shift != 0.0f || ", "", HUGE_FIRST),
        Fault("huge-rows-not-shifted", "S[i][j][e] -= rows.origin[i][e / 2].shift;", ";", HUGE),
        Fault("no-row-is-huge", "constexpr float kHuge = 0x1p13f;", "constexpr float kHuge = 0x1p120f;", HUGE),
        Fault("lse-of-a-row-without-keys", "total == 0.0f ? -infinity() : value", "value", UNSEEN),
        Fault("values-behind-the-end", "p.v_row, p.len_kv - first_key, kHeadDimV", "p.v_row, kBlockKv, kHeadDimV", PADDED),
        Fault("output-one-row-off", "batch, work.head, first);", "batch, work.head, max(0, first - 1));", FULL),
    ],
    races={
        caught.IN_FLIGHT: [
            Fault("wait-removed", ladder.TILE_WAIT, "", FULL),
            Fault("wait-one-group-short", ladder.TILE_WAIT, "cp_async_wait_group<kStages - 1>();", FULL),
        ],
        caught.NOT_WRITTEN: [Fault("barrier-before-a-tile", ladder.TILE_BARRIER, "//", FULL)],
        caught.OVERWRITE: [
            Fault("barrier-before-the-output", ladder.OUTPUT_BARRIER, "//", WIDE),
            Fault("barrier-between-the-passes", _PASSES, "", FULL),
        ],
        "": [Fault("wait-for-the-queries-without-keys", "cp_async_wait_group<0>();", "", NOTHING)],
    },
)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    caught.compile_planted(request)


@pytest.mark.parametrize("fault", ladder.listed_faults(FAULTS.wrong))
def test_caught(fault: Fault) -> None:
    assert ladder.caught_on_one_sm(fault), f"fault {fault.name} was accepted"


@pytest.mark.parametrize("fault", ladder.listed_faults(FAULTS.raced))
def test_a_race_is_caught_by_the_check_for_it(fault: Fault) -> None:
    found = ladder.caught_on_one_sm(fault)
    assert found.startswith("shared memory: ")
    assert FAULTS.check_of(fault) in found


def test_names_are_unique() -> None:
    FAULTS.require_unique_names()
