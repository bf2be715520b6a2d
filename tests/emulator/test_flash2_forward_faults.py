"""Planted faults of FlashAttention-2's forward kernel in both splits of its warps, each caught on the CPU."""

from __future__ import annotations

from functools import partial

import pytest

from flashgen.codegen.families.flash2_forward.config import Flash2ForwardConfig
from flashgen.codegen.ladder import WarpSplit
from flashgen.codegen.problem import Dtype, Mask
from tests.support import caught, ladder
from tests.support.cases import Layout
from tests.support.fault import Fault, setting

given = partial(setting, config=Flash2ForwardConfig(block_q=64, block_kv=32, warps=4), batch=1)
FULL = given((70, 150))
CAUSAL = given((150, 200), mask=Mask.CAUSAL)
EDGE = given((64, 65), mask=Mask.CAUSAL)  # key 64 is seen by query 63 alone, the last of its block, and begins a tile
PADDED = given((70, 100), width=(72, 72), layout=Layout.PADDED)  # the next 16 bytes behind a tensor's row are no zeros
LARGE = given((70, 300), magnitude=64.0)  # scores differ by more than an exponent of fp32 holds
HUGE = given((70, 150), dtype=Dtype.BF16, magnitude=1e12)  # rounding a scaled maximum is worth more than an exponent's range
HUGE_FIRST = given((70, 150), rising=20000.0)  # no row is huge after the first key tiles
UNSEEN = given((200, 50), mask=Mask.CAUSAL)
WIDE = given((70, 150), width=(32, 128))  # the output of a warp takes the place of rows of Q that other warps read
NOTHING = given((70, 0), width=(32, 128))  # without keys nobody waits for Q

of_keys = partial(setting, config=Flash2ForwardConfig(block_q=16, block_kv=64, warps=4, warp_split=WarpSplit.KEYS), batch=1)
KEYS = of_keys((40, 200))
KEYS_LARGE = of_keys((40, 300), magnitude=64.0)
KEYS_CAUSAL = of_keys((40, 60), mask=Mask.CAUSAL)

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
        Fault("last-key-of-a-block-not-visited", "keys(first_query + kBlockQ - 1);", "keys(first_query + kBlockQ - 2);", EDGE),
        Fault("last-tile-skipped", "(seen.end, ring, kKeyBytes,", "(seen.end - 1, ring, kKeyBytes,", FULL),
        Fault(
            "stale-row-max",
            "fmaxf(before, mul_rn(maximum[i][h], scale_log2));",
            "before == kInitialRowMax ? maximum[i][h] * scale_log2 : before;",
            LARGE,
        ),
        Fault("sum-not-rescaled", "rows.row_sum[i][h] *= factor_of_sum;", "", FULL),
        Fault("output-not-rescaled", "        scale_rows(O, [&](int i, int h) { return factor[i][h]; });\n", "", FULL),
        Fault("sum-of-the-last-tile", "before = row_sum[i][h], added", "before = 0.0f, added", FULL),
        Fault("output-not-normalised", "return normaliser(rows.total(i, h));", "return 1.0f;", FULL),
        Fault("lse-base-2", "O, lse_of_lane<kRowTiles>(", "O, 1.442695f * lse_of_lane<kRowTiles>(", FULL),
        Fault("huge-rows-forgotten", "rows.origin[i][h].shift != 0.0f || ", "", HUGE_FIRST),
        Fault("huge-rows-not-shifted", "S[i][j][e] -= rows.origin[i][e / 2].shift;", ";", HUGE),
        Fault("lse-of-a-row-without-keys", "total == 0.0f ? -infinity() : value", "value", UNSEEN),
        Fault("values-behind-the-end", "p.v_row, p.len_kv - first_key, kHeadDimV", "p.v_row, kBlockKv, kHeadDimV", PADDED),
        Fault("all-warps-with-the-first-keys", "own_key = warp_index() * kKeysPerWarp;", "own_key = 0;", KEYS),
        Fault("values-of-another-warp", "+ own_key * ValueTile::kRowBytes", "+ (own_key ^ kKeysPerWarp) * ValueTile::kRowBytes", KEYS),
        Fault("mask-as-for-the-first-warp", "key_tile * kBlockKv + own_key, chain", "key_tile * kBlockKv, chain", KEYS_CAUSAL),
        Fault("last-warp-left-out", "(warp_index() == 0 ? kWarps : 1)", "(warp_index() == 0 ? kWarps - 1 : 1)", KEYS),
        Fault("row-max-of-the-first-warp", "if (height > 0.0f) rows.origin[i][h] = other;", "", KEYS_LARGE),
        Fault("warps-sums-not-rescaled", "others.total(i, h) * others_factor,", "others.total(i, h),", KEYS),
        Fault("warps-output-not-rescaled", "others_O[i][j][e] * others_factor;", "others_O[i][j][e];", KEYS),
    ],
    races={
        caught.IN_FLIGHT: [
            Fault("wait-removed", ladder.TILE_WAIT, "", FULL),
            Fault("wait-one-group-short", ladder.TILE_WAIT, "cp_async_wait_group<kStages - 1>();", FULL),
        ],
        caught.NOT_WRITTEN: [Fault("barrier-before-a-tile", ladder.TILE_BARRIER, "//", FULL)],
        caught.NOT_SEEN: [Fault("barrier-before-the-first-warp-adds-up", "barrier_sync();  // what all warps have", "//", KEYS)],
        caught.OVERWRITE: [
            Fault("barrier-before-the-output", ladder.OUTPUT_BARRIER, "//", WIDE),
            Fault("barrier-before-the-warps-rows", ladder.OUTPUT_BARRIER, "//", KEYS),
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
