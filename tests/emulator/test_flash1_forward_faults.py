"""Planted faults of the forward kernel of FlashAttention's first version, each caught on the CPU."""

from __future__ import annotations

from functools import partial

import pytest

from flashgen.codegen.families.flash1_forward.config import Flash1ForwardConfig, ParallelOver
from flashgen.codegen.problem import Dtype, Mask
from tests.support import caught, ladder
from tests.support.cases import Layout
from tests.support.fault import Fault, setting

given = partial(setting, config=Flash1ForwardConfig(block_q=32, block_kv=32, warps=2), batch=1)
FULL = given((70, 150))
CAUSAL = given((150, 200), mask=Mask.CAUSAL)
EDGE = given((32, 33), mask=Mask.CAUSAL)  # key 32 is seen by query 31 alone, the last of its tile, and begins a tile
PADDED = given((70, 100), width=(72, 72), layout=Layout.PADDED)  # the next 16 bytes behind a tensor's row are no zeros
LARGE = given((70, 300), magnitude=64.0)  # scores differ by more than an exponent of fp32 holds
HUGE = given((70, 150), dtype=Dtype.BF16, magnitude=1e12)  # rounding a scaled maximum is worth more than an exponent's range
HUGE_FIRST = given((70, 150), rising=20000.0)  # no row is huge after the first key tiles
UNSEEN = given((200, 50), mask=Mask.CAUSAL)
WIDE = given((70, 150), width=(32, 128))  # the output of a warp takes the place of rows of Q that other warps read
# One block has all tiles of a head, whichever GPU it is.
ALONE = partial(setting, config=Flash1ForwardConfig(block_q=32, block_kv=32, warps=2, parallel_over=ParallelOver.HEADS), batch=1)
ALONE_CAUSAL = ALONE((150, 200), mask=Mask.CAUSAL)

_LOAD = "if (key_tile > 0) rows.for_each(O, /*stores=*/false"
_STORE = "if (key_tile + 1 < seen.end) return"
_TILE = "sequences.first_tile(batch, work.head) * kBlockQ"
_SEEING = "const int seeing = key_tile == 0 ? 0 :"
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
        Fault("last-key-of-a-tile-not-visited", "keys(first_query + kBlockQ - 1);", "keys(first_query + kBlockQ - 2);", EDGE),
        Fault("last-tile-skipped", "key_tile < key_tiles; ++key_tile", "key_tile < key_tiles - 1; ++key_tile", FULL),
        Fault(
            "stale-row-max",
            "fmaxf(before, mul_rn(maximum[i][h], scale_log2));",
            "before == kInitialRowMax ? maximum[i][h] * scale_log2 : before;",
            LARGE,
        ),
        Fault("sum-not-rescaled", "rows.row_sum[i][h] *= factor_of_sum;", "", FULL),
        Fault(
            "output-rescaled-without-its-sum", "return rows.row_sum[i][h]; });  // rescaled", "return factor[i][h]; });  // rescaled", FULL
        ),
        Fault(
            "output-not-rescaled",
            "        scale_rows(O, [&](int i, int h) { return rows.row_sum[i][h]; });  // rescaled by now\n",
            "",
            FULL,
        ),
        Fault("output-not-normalised", "return normaliser(rows.total(i, h));", "return 1.0f;", FULL),
        Fault("lse-base-2", "O, lse_of_lane<kRowTiles>(", "O, 1.442695f * lse_of_lane<kRowTiles>(", FULL),
        Fault("buffer-read-at-the-first-step", _LOAD, "if (key_tile >= 0) rows.for_each(O, /*stores=*/false", FULL),
        Fault("buffer-not-read-at-the-second-step", _LOAD, "if (key_tile > 1) rows.for_each(O, /*stores=*/false", FULL),
        Fault("out-written-one-step-early", _STORE, "if (key_tile + 2 < seen.end) return", FULL),
        Fault(
            "buffer-of-the-first-head", "sequences.first_tile(batch, work.head) * kBlockQ", "sequences.first_tile(batch, 0) * kBlockQ", FULL
        ),
        Fault("buffer-of-the-first-tile", "* kBlockQ + first_query + first_row)", "* kBlockQ + first_row)", ALONE_CAUSAL),
        Fault("row-max-not-kept", "move(origin[i][h].shift, n), move(origin[i][h].row_max, n + 8), ", "", FULL),
        Fault("queries-without-keys-not-visited", _SEEING, "const int seeing =", given((200, 50), mask=Mask.CAUSAL)),
        Fault(
            "tiles-that-see-the-keys-one-too-few", "(last_tile - seeing) / p.splits + 1", "(last_tile - seeing) / p.splits", ALONE_CAUSAL
        ),
        Fault("queries-of-the-tile-before", "load_queries(last_tile - step * p.splits, to)", "load_queries(last_tile, to)", ALONE_CAUSAL),
        Fault("huge-rows-forgotten", "rows.origin[i][h].shift != 0.0f || ", "", HUGE_FIRST),
        Fault("huge-rows-not-shifted", "S[i][j][e] -= rows.origin[i][e / 2].shift;", ";", HUGE),
        Fault("lse-of-a-row-without-keys", "total == 0.0f ? -infinity() : value", "value", UNSEEN),
        Fault("values-behind-the-end", "p.v_row, p.len_kv - first_key, kHeadDimV", "p.v_row, kBlockKv, kHeadDimV", PADDED),
    ],
    races={
        caught.IN_FLIGHT: [
            Fault("wait-removed", ladder.TILE_WAIT, "", FULL),
            Fault("wait-one-group-short", ladder.TILE_WAIT, "cp_async_wait_group<kStages - 1>();", FULL),
        ],
        caught.NOT_WRITTEN: [Fault("barrier-before-a-tile", ladder.TILE_BARRIER, "//", FULL)],
        caught.OVERWRITE: [
            Fault("barrier-before-the-output", ladder.OUTPUT_BARRIER, "//", WIDE),
            Fault("barrier-before-the-next-keys", "barrier_sync();  // nobody reads the keys and values before", "//", FULL),
        ],
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
