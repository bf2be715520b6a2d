"""Planted faults: patches on the rendered text of a kernel, each with inputs on which the numerics rule must reject it.

A patch that no longer applies is an error: whoever changes the templates moves the fault along.
No patch reads or writes outside the buffers of `cases.Poisoned`.
"""

from __future__ import annotations

from flashgen.codegen.families.attention_forward.config import QueryPlace
from flashgen.codegen.problem import Dtype, Mask
from tests.support.cases import Layout
from tests.support.fault import Fault, setting
from tests.support.faults_sm90 import SM90

# fp16 where nothing else is said: its rounding hides the least.
FULL = setting((300, 1000), (65, 200))
CAUSAL = setting((700, 700), (300, 500), mask=Mask.CAUSAL)
# Three rows in four see no key, and many of them share a warp with one that does.
UNSEEN = setting((400, 100), (150, 70), mask=Mask.CAUSAL)
PADDED = setting((200, 300), width=(72, 72), layout=Layout.PADDED)
TAIL = setting((100, 70), (100, 129))
TALL = setting((300, 1000), config=(128, 64, 32, 4, 2))  # 32 rows a warp
WIDE = setting((300, 500), width=(128, 128))

# Keys are visited from the last to the first. On the way scores of RISING outgrow a reference by 2^8 some seven times, and by 2^57 in
# all, which fp16 does not hold. Those of FALLING are far below 0, the more so the earlier the row; and half of the 64 rows of a block
# see no key of the first step. LARGE: from one key to the next scores differ by more than fp16 holds.
RISING = setting((300, 1000), (65, 200), rising=40.0)
FALLING = setting((700, 700), mask=Mask.CAUSAL, rising=-4000.0)
LARGE = setting((300, 1000), magnitude=64.0)
# Rounding a scaled maximum of HUGE is worth more than an exponent's range.
HUGE = setting((300, 1000), dtype=Dtype.BF16, magnitude=1e12)

# Races show where many warps run apart and much memory is under way: two stages, so that each tile is waited for soon.
RACE = setting((2048, 2048), (8192, 128), heads=(16, 16), batch=4, config=(256, 48, 48, 16, 2))
RACE_REGISTERS = setting((8192, 64), (2048, 640), heads=(16, 16), batch=4, config=(128, 64, 64, 8, 2), query=QueryPlace.REGISTERS)
# Q is small and the output large: that of one warp takes the place of the queries of all. They are read until the last step but one.
RACE_OUTPUT = setting((8192, 128), (8192, 256), heads=(16, 16), batch=4, width=(16, 128), config=(128, 64, 32, 8, 2))
# Waits: K and V of each block come from DRAM (142 MB in all, more than any L2), and what little work lies between a load and its use
# takes less time than that. 2 and 3 stages.
WAIT = {stages: setting((128, 256), heads=(16, 16), batch=64, width=(16, 256), config=(128, 16, 16, 8, stages)) for stages in (2, 3)}

_MASK_NEXT = "if (masked) mask_scores(S, first_query + first_row, (step - 1) * kStepKv, chain);"
_NEXT_SCORES = "if (softmax.needs_rescale(S, masked)) softmax.rescale(S, O);"

SOFTMAX = [
    Fault("output-not-rescaled", "O[i][j][e] *= factor[i][h];", "O[i][j][e] *= 1.0f;", RISING),
    Fault("sum-not-rescaled", "row.row_sum[h] *= factor_of_sum;", "", RISING),
    Fault("partial-sum-not-rescaled", "partial[i][h] *= factor_of_sum;", "", RISING),
    Fault(
        "normalised-tile-by-tile",
        _NEXT_SCORES,
        """for (int i = 0; i < kRowTiles; ++i)
            for (int h = 0; h < 2; ++h) {
                float total = 0.0f;
                for (int j = 0; j < kStepKv / 8; ++j)
                    for (int e = h * 2; e < h * 2 + 2; ++e) total += ex2_approx_ftz(S[i][j][e] * p.scale_log2);
                total += shfl_sync_bfly(total, 1);
                total += shfl_sync_bfly(total, 2);
                for (int j = 0; j < kStepKv / 8; ++j)
                    for (int e = h * 2; e < h * 2 + 2; ++e) S[i][j][e] -= 1.442695f * logf(total) / p.scale_log2;
            }
        """
        + _NEXT_SCORES,
        setting((300, 1000), (65, 200), config=(64, 64, 64, 4, 2)),
    ),
    Fault("first-reference-not-taken", "softmax.start(S);", "", FULL),
    Fault(
        "reference-not-updated",
        "ex2_approx_ftz(row_max[i][h] - next);\n                    row_max[i][h] = next;",
        "ex2_approx_ftz(row_max[i][h] - next);",
        RISING,
    ),
    Fault("references-never-outgrown", "return vote_sync_any(any);", "return false;", RISING),
    Fault("headroom-beyond-fp16", "constexpr float kHeadroom = 8.0f;", "constexpr float kHeadroom = 200.0f;", RISING),
    Fault("unseen-row-starts-at-0", "constexpr float kInitialRowMax = -3.0e38f;", "constexpr float kInitialRowMax = 0.0f;", FALLING),
    Fault(
        "reference-follows-masked-keys",
        _MASK_NEXT + "\n        " + _NEXT_SCORES,
        _NEXT_SCORES + "\n        " + _MASK_NEXT,
        FALLING,
    ),
    Fault("maximum-of-half-the-lanes", "return fmaxf(value, shfl_sync_bfly(value, 2));", "return value;", FULL),
    Fault(
        "maximum-of-the-first-columns",
        "for (int j = 2; j < kKeyTiles; ++j) partial[j % 2] = fmaxf(",
        "for (int j = 2; j < 2; ++j) partial[j % 2] = fmaxf(",
        LARGE,
    ),
    Fault(
        "reference-of-the-other-row",
        "fmaf(pair[1], scale_log2, -row_max[i][e % 2])",
        "fmaf(pair[1], scale_log2, -row_max[i][1 - e % 2])",
        FULL,
    ),
    Fault("sum-of-half-the-lanes", "return value + shfl_sync_bfly(value, 2);", "return value;", FULL),
    Fault("sum-in-the-wrong-row", "partial[i][e % 2] += high;", "partial[i][0] += high;", FULL),
    Fault("sum-lacks-the-last-tile", "add_partial();\n        const int own", "const int own", FULL),
    Fault(
        "sum-has-the-last-tile-only",
        "softmax.add_partial();",
        "for (auto& rows : softmax.partial) rows[0] = rows[1] = 0.0f;",
        FULL,
    ),
    Fault(
        "sum-has-tiles-twice",
        "row.compensation[h] += partial[i][h] - (row.row_sum[h] - before);\n                partial[i][h] = 0.0f;",
        "row.compensation[h] += partial[i][h] - (row.row_sum[h] - before);",
        FULL,
    ),
    Fault("lse-base-2", "const float value = log_sum_exp(", "const float value = 1.442695f * log_sum_exp(", FULL),
    Fault("lse-reference-in-base-2", "RowMaxFactor{ln2_hi, ln2_lo}", "RowMaxFactor{1.0f, ln2_lo}", FULL),
    Fault("lse-of-another-row", "row = own * 8 + lane_index() / 4;", "row = (own ^ 1) * 8 + lane_index() / 4;", FULL),
    Fault("lse-of-another-lane", "if (own == i * 2 + h) own_total", "if (own == h * 2 + i) own_total", TALL),
    Fault("scale-not-applied", "softmax(p.scale_log2, p.ln2_hi, sums", "softmax(1.442695f, p.ln2_hi, sums", FULL),
    Fault("scale-applied-twice", "fmaf(pair[0], scale_log2,", "fmaf(pair[0] * scale_log2, scale_log2,", FULL),
    Fault("guard-of-the-reference", "next = fmaxf(row_max[i][h], mul_rn(", "next = fmaxf(-infinity(), mul_rn(", UNSEEN),
    Fault("huge-maximum-rounded", "constexpr float kHuge = 0x1p13f;", "constexpr float kHuge = 0x1p120f;", HUGE),
    Fault("huge-scores-half-shifted", "S[i][j][h * 2] -= shift[i][h];", "", HUGE),
    Fault("huge-lse-in-the-wrong-unit", "const RowMaxFactor factor = huge ?", "const RowMaxFactor factor = false ?", HUGE),
    Fault("guard-of-the-sum", "return total == 0.0f ? 0.0f : y;", "return y;", UNSEEN),
]

MASK = [
    Fault("mask-one-key-too-many", "return {0, query + causal_offset + 1};", "return {0, query + causal_offset + 2};", CAUSAL),
    Fault("mask-one-key-too-few", "return {0, query + causal_offset + 1};", "return {0, query + causal_offset};", CAUSAL),
    Fault("mask-aligned-top-left", "{len_kv - len_q}}", "{0}}", CAUSAL),
    Fault("mask-of-the-step-in-use", "first_row, (step - 1) * kStepKv,", "first_row, step * kStepKv,", CAUSAL),
    Fault("masked-step-too-few", "for (; step > steps.full_end;", "for (; step > steps.full_end + 1;", CAUSAL),
    Fault("one-key-past-the-end", "if (key >= seen.end ||", "if (key > seen.end ||", TAIL),
    Fault(
        "tail-not-masked",
        "(first_end - (first_end < last_end)) / kBlockKv,",
        "(first_end + kBlockKv - 1) / kBlockKv,",
        TAIL,
    ),
    # Key 128 is seen by query 63 alone, the last of its block, and begins a step.
    Fault(
        "last-key-of-a-block-not-visited",
        "keys(first_query + kBlockQ - 1);",
        "keys(first_query + kBlockQ - 2);",
        setting((64, 129), mask=Mask.CAUSAL),
    ),
    Fault("last-step-skipped", "return end > begin ? end - 1 : -1;", "return end > begin ? end - 2 : -1;", FULL),
    Fault("last-tile-skipped", "return end > begin ? end - 1 : -1;", "return end > begin ? end - 1 - kSteps : -1;", FULL),
    Fault("first-step-skipped", "if (step == steps.begin) run_step(/*has_next=*/false, /*next_masked=*/false);", "", FULL),
    Fault("first-tile-skipped", "for (; step > steps.full_begin; --step)", "for (; step >= kSteps; --step)", FULL),
]

ROUNDING = [
    Fault(
        "truncating-conversion",
        "cvt.rn.f16x2.f32",
        "cvt.rz.f16x2.f32",
        setting((300, 1000), magnitude=1.0, offset=1500.0),
        on_cpu=("+ 0xfffu + (bits >> 13 & 1);", ";"),
    ),
    Fault(
        "accumulator-in-fp16",
        _NEXT_SCORES,
        """for (auto& tiles : O)
            for (auto& four : tiles)
                for (float& x : four) {
                    u16 half;
                    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
                    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
                }
        """
        + _NEXT_SCORES,
        # Scores fall, so that the accumulator stays within fp16.
        setting((300, 512), magnitude=1.0, offset=300.0, rising=-20.0, config=(64, 16, 16, 4, 2)),
        on_cpu=(
            _NEXT_SCORES,
            """for (auto& tiles : O)
            for (auto& four : tiles)
                for (float& x : four) x = emulator::value_of(Fp16{emulator::bits_of(x, Fp16{})});
        """
            + _NEXT_SCORES,
        ),
    ),
    Fault(
        "accumulator-in-bf16",
        _NEXT_SCORES,
        """for (auto& tiles : O)
            for (auto& four : tiles)
                for (float& x : four) x = __uint_as_float(cvt_rn_x2<Bf16>(0.0f, x) & 0xffff0000u);
        """
        + _NEXT_SCORES,
        setting((300, 2000), dtype=Dtype.BF16, offset=190.0),
    ),
]

PLACES = [
    Fault("wrong-head-under-gqa", "divide(work.head, p.group_reciprocal)", "work.head % divide(p.heads_q, p.group_reciprocal)", FULL),
    Fault("reciprocal-rounded-down", "mul_hi(n, reciprocal)", "mul_hi(n, reciprocal - 1)", FULL),
    Fault(
        "division-by-1",
        "reciprocal == 0 ? n : static_cast<int>(mul_hi(n, reciprocal))",
        "static_cast<int>(mul_hi(n, reciprocal))",
        setting((300, 1000), heads=(4, 4)),
    ),
    Fault("batch-stride-ignored", "{p.k_batch, p.k_head, p.k_row}, batch,", "{p.k_batch, p.k_head, p.k_row}, 0,", FULL),
    Fault("query-tile-ignored", "p.q_row}, batch, work.head, first_query);", "p.q_row}, batch, work.head, 0);", FULL),
    Fault("values-one-row-off", "v + last * kBlockKv * v_row", "v + (last * kBlockKv - 1) * v_row", FULL),
    Fault(
        "keys-one-row-off",
        "k + (last * kBlockKv - kStepKv) * k_row",
        "k + (last * kBlockKv - kStepKv + 1) * k_row",
        setting((300, 1000)),
    ),
    Fault("first-keys-of-the-step-before", "k + step * kStepKv * p.k_row", "k + (step - 1) * kStepKv * p.k_row", FULL),
    Fault(
        "keys-of-another-step",
        "keys = stage + step_in_tile * KeyStep::kBytes;",
        "keys = stage + (kSteps - 1 - step_in_tile) * KeyStep::kBytes;",
        FULL,
    ),
    Fault(
        "values-of-another-step",
        "KeyTile::kBytes + step_in_tile * ValueStep::kBytes;",
        "KeyTile::kBytes + (kSteps - 1 - step_in_tile) * ValueStep::kBytes;",
        FULL,
    ),
    Fault("values-of-another-slice", "offsets.at(values, slice * 16, j)", "offsets.at(values, (slice ^ 1) * 16, j)", FULL),
    Fault("scores-of-another-slice", "(S, slice * 2, query, keys,", "(S, (slice ^ 1) * 2, query, keys,", FULL),
    Fault("tile-begun-at-its-end", "int step_in_tile = step % kSteps;", "int step_in_tile = kSteps - 1;", FULL),
    Fault("tile-left-early", "step_in_tile = kSteps - 1;", "step_in_tile = 0;", FULL),
    Fault("stale-stage", "stage = stage == last_stage ? ring : stage + kStageBytes;", "stage = ring;", FULL),
    Fault("second-rows-read-as-the-first", "offsets.at(rows, row_tile * 16, k * 2)", "offsets.at(rows, 0, k * 2)", TALL),
    Fault("second-columns-read-as-the-first", "chunks / Rows::kSwizzle * Rows::kSwizzle);", "0);", WIDE),
    Fault(
        "load-without-swizzle",
        "cp_async_16(partition.address(tile, pass, group), from);",
        """cp_async_16(tile.base + (pass * Passes::kRowsPerPass + partition.row) * Tile::kRowBytes
                                + (group * Passes::kLanes + partition.chunk) * 16, from);""",
        FULL,
    ),
    Fault(
        "read-without-swizzle",
        "offset[i] = rows.at(lane % 16, lane / 16 ^ i * 2);",
        "offset[i] = lane % 16 * Rows::kRowBytes + (lane / 16 ^ i * 2) * 16;",
        FULL,
    ),
    Fault("keys-read-from-the-wrong-columns", "lane / 8 % 2) - offset[0];", "lane / 8 % 2 ^ 1) - offset[0];", FULL),
    Fault("values-read-with-wrong-swizzle", "offsets.at(values, slice * 16, j));", "offsets.at(values, slice * 16, j) ^ 16);", FULL),
    Fault(
        "columns-past-the-end-read",
        "TileReader<KeyTile, kThreads, kHeadDim, Element> keys",
        "TileReader<KeyTile, kThreads, (kHeadDim + 15) / 16 * 16, Element> keys",
        PADDED,
    ),
    Fault("columns-past-the-end-written", "store_tile<32, kColumnsValid>(rows", "store_tile<32, kOutTiles * 8>(rows", PADDED),
    # One row is missing, and fits between the tensor and the end of its buffer.
    Fault(
        "rows-past-the-end-written",
        "pass * partition.kRowsPerPass + partition.row < rows_valid &&\n                ",
        "",
        setting((127, 70)),
    ),
    Fault("lse-past-the-end-written", "if (own < kRowTiles * 2 && row < rows_valid)", "if (own < kRowTiles * 2)", TAIL),
]

_FIRST = "barrier_sync();  // Q and the first keys are here"
_STAGE = "barrier_sync();  // the next stage is here, and nobody reads the one in use any more"
_LOAD = "keys_and_values.load_next(stage);\n        stage"
_FIRST_WAIT = "cp_async_wait_group<kStages - 1>();"
_WAIT = "cp_async_wait_group<kStages - 2>();"
_NAP = "if (warp_index() % 2) __nanosleep(2000);"


def _slow(text: str) -> tuple[tuple[str, str], ...]:
    """Lets every other warp come late to this line."""
    return ((text, f"{_NAP}\n{text}"),)


_SLOW_LOADS = _slow("    queries_in.load(query_tile, 0, queries);")
_SLOW_STEPS = _slow("            softmax.exp2_and_sum<Element>(P, S, slice);")

RACES = [
    Fault("barrier-before-queries", _FIRST, "", RACE, race=True, also=_SLOW_LOADS),
    Fault("barrier-before-query-fragments", _FIRST, "", RACE_REGISTERS, race=True, also=_SLOW_LOADS),
    Fault("barrier-before-a-stage", _STAGE, "", RACE, race=True),
    Fault(
        "stage-loaded-before-the-barrier",
        f"{_STAGE}\n        {_LOAD}",
        _LOAD.replace("\n", f"\n        {_STAGE}\n"),
        RACE,
        race=True,
        also=_SLOW_STEPS,
    ),
    Fault(
        "barrier-before-output",
        "barrier_sync();  // O is wider than Q and reaches into rows of other warps, which read their Q no more",
        "",
        RACE_OUTPUT,
        race=True,
        also=_SLOW_STEPS,
    ),
    Fault(
        "output-in-the-place-of-another-warp",
        "out_tile{query_tile.base + first_row * QueryTile::kRowBytes};",
        "out_tile{query_tile.base};",
        RACE,
        race=True,
        also=_slow("    store_tile<32, kColumnsValid>(rows"),
    ),
    Fault("sums-in-the-place-of-another-warp", "slots(memory + thread_index() * 16)", "slots(memory + lane_index() * 16)", RACE, race=True),
    Fault("first-wait-removed", _FIRST_WAIT, "", WAIT[2], race=True),
    Fault("first-wait-one-group-short", _FIRST_WAIT, "cp_async_wait_group<kStages>();", WAIT[3], race=True),
    Fault("wait-removed", _WAIT, "", WAIT[2], race=True),
    Fault("wait-one-group-short", _WAIT, "cp_async_wait_group<kStages - 1>();", WAIT[2], race=True),
    Fault("wait-one-group-short-of-three-stages", _WAIT, "cp_async_wait_group<kStages - 1>();", WAIT[3], race=True),
]

FAULTS = [*SOFTMAX, *MASK, *ROUNDING, *PLACES, *RACES, *SM90]
