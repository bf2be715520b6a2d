"""Planted faults of the family for Hopper: see faults.py. Those that would hang a GPU are planted in the emulator alone: tests/emulator."""

from __future__ import annotations

from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, RowMax, Scheduler
from flashgen.codegen.problem import Dtype, Mask
from tests.support.fault import Fault, setting

LAZY = AttentionForwardSm90Config(2, 64, 2, 2, 1, RowMax.STALE, True, Scheduler.DYNAMIC)
FOLLOWING = AttentionForwardSm90Config(2, 64, 2, 2, 1, RowMax.EXACT, False, Scheduler.STATIC)

FULL = setting((300, 1000), (65, 200), config=LAZY)
CAUSAL = setting((700, 700), (300, 500), mask=Mask.CAUSAL, config=LAZY)
UNSEEN = setting((400, 100), (150, 70), mask=Mask.CAUSAL, config=LAZY)
WIDE = setting((300, 500), width=(128, 128), config=AttentionForwardSm90Config(2, 64, 2, 2, 1))

# Scores rise from the last key, where rows begin, to the first one: with RISING by 2^57 in all, which fp16 does not hold.
RISING = setting((300, 1000), (65, 200), rising=40.0, config=LAZY)
RISING_FOLLOWED = setting((300, 1000), (65, 200), rising=40.0, config=FOLLOWING)
# Rounding a scaled maximum of HUGE is worth more than an exponent's range.
HUGE = setting((300, 1000), dtype=Dtype.BF16, magnitude=1e12, config=LAZY)
# More tiles than any GPU has SMs, so that blocks go from one to the next.
MANY = setting((10, 150), heads=(16, 16), batch=16, config=LAZY)
MANY_FOLLOWED = setting((10, 150), heads=(16, 16), batch=16, config=FOLLOWING)
# Four heads of a group in a tile.
PACKED = setting((90, 200), mask=Mask.CAUSAL, heads=(16, 2), config=AttentionForwardSm90Config(2, 64, 2, 2, 1, pack_gqa=4))
# Many blocks, of which each has many tiles, whose K and V come from DRAM.
RACE = setting((256, 512), heads=(16, 16), batch=64, width=(256, 256), config=AttentionForwardSm90Config(2, 64, 2, 1, 2))

_DIVIDED = "const int head_kv = divide(work.first_head, p.group_reciprocal);"
_SEEN = "info.end_block = max(info.blocks(p).end, 1);"

SM90 = [
    Fault("sm90-output-not-rescaled", "O[j][e] *= factor[e / 2];", "O[j][e] *= 1.0f;", RISING),
    Fault("sm90-output-not-rescaled-followed", "O[j][e] *= factor[e / 2];", "O[j][e] *= 1.0f;", RISING_FOLLOWED),
    Fault("sm90-sum-not-rescaled", "row_sum[h] *= factor_of_sum;", "", RISING),
    Fault("sm90-sum-outgrown-unseen", "if (!vote_sync_any(!fits)) break;", "break;", RISING),
    Fault("sm90-limit-too-high-for-fp16", "return 0x1p15f", "return 0x1p30f", RISING),
    Fault("sm90-total-of-a-row-max-before-it-settled", "total *= __int_as_float((127 - power) << 23);", "", RISING),
    Fault("sm90-maximum-of-half-the-lanes", "return fmaxf(value, shfl_sync_bfly(value, 2));", "return value;", RISING),
    Fault("sm90-sum-of-half-the-lanes", "return value + shfl_sync_bfly(value, 2);", "return value;", FULL),
    Fault("sm90-half-of-a-sum", "partial[h][0] += partial[h][1];", "", FULL),
    Fault("sm90-softmax-of-the-tile-before", "softmax.restart();", "", MANY_FOLLOWED),
    Fault("sm90-mask-off-by-one", "if (key >= seen.end ||", "if (key > seen.end ||", CAUSAL),
    Fault("sm90-mask-of-the-last-keys", "if (key >= seen.end ||", "if (", FULL),
    Fault("sm90-mask-of-another-warpgroup", "first_query + consumer * kOwnQueries);", "first_query + 64);", CAUSAL),
    Fault("sm90-first-block-skipped", _SEEN, _SEEN.replace(".end,", ".end - 1,"), FULL),
    Fault("sm90-unseen-rows-not-empty", "return total == 0.0f ? 0.0f : y;", "return total == 0.0f ? 1.0f / 0.0f : y;", UNSEEN),
    Fault("sm90-wrong-head", _DIVIDED, "const int head_kv = 0;", FULL),
    Fault("sm90-values-of-another-head", "v_head = head_kv", "v_head = 0", FULL),
    Fault(
        "sm90-queries-of-another-batch",
        "work.coordinate1(), work.coordinate2(), work.batch);\n",
        "work.coordinate1(), work.coordinate2(), 0);\n",
        FULL,
    ),
    Fault("sm90-one-row-normalises-both", "pair[i % 2 * 2] * normalisers[i % 2]", "pair[i % 2 * 2] * normalisers[0]", FULL),
    Fault("sm90-output-of-the-tile-in-work", "Work::load(finished)", "Work::load(current)", MANY),
    Fault("sm90-lse-of-the-other-row", "::first_row_of_pair() + i * 8,", "::first_row_of_pair() + 8 - i * 8,", FULL),
    Fault("sm90-lse-in-base-2", "const float lse = log_sum_exp(", "const float lse = 1.44269504f * log_sum_exp(", FULL),
    Fault(
        "sm90-truncating-conversion",
        "cvt.rn.f16x2.f32",
        "cvt.rz.f16x2.f32",
        setting((300, 1000), magnitude=1.0, offset=1500.0, config=LAZY),
        on_cpu=("+ 0xfffu + (bits >> 13 & 1);", ";"),
    ),
    Fault("sm90-wrong-fragment-map", "P[j / 2][j % 2 * 2 + h]", "P[j / 2][h * 2 + j % 2]", FULL),
    Fault("sm90-wrong-swizzle-of-output", "((chunk ^ row % 8) * 16)", "(chunk * 16)", FULL),
    Fault("sm90-wrong-panel-of-output", "from.base, panel * 64, coordinate1", "from.base, 0, coordinate1", WIDE),
    Fault("sm90-columns-of-the-first-step", "step / 4 * kPanelBytes + step % 4 * 32", "step / 4 * kPanelBytes", FULL),
    Fault("sm90-panel-of-the-first-step", "row * 128 + step / 4 * kPanelBytes", "row * 128", WIDE),
    Fault(
        "sm90-wrong-panel-distance",
        "step * 16 * 128, kPanelBytes)",
        "step * 16 * 128)",
        WIDE,
    ),
    Fault("sm90-rows-of-the-first-warpgroup", "(q_state.stage), consumer * 64,", "(q_state.stage), 0,", FULL),
    Fault("sm90-values-of-the-block-before", "v_block = k_block,", "v_block = max(k_block - 1, 0),", FULL),
    Fault("sm90-packed-rows-masked-as-queries", "+ lane / 4) / kPackGqa;", "+ lane / 4);", PACKED),
    Fault("sm90-packed-mask-of-rows-beyond", "kOwnQueries = 64 / kPackGqa;", "kOwnQueries = 64;", PACKED),
    Fault("sm90-packed-lse-of-the-first-head", "first_head + row % kPackGqa", "first_head", PACKED),
    Fault("sm90-packed-heads-of-the-first-set", "work.head * kPackGqa", "0", PACKED),
    Fault("sm90-packed-output-of-rows", ": first_query + row / kPackGqa; }", ": first_query + row; }", PACKED),
    Fault("sm90-huge-maximum-rounded", "constexpr float kHuge = 0x1p13f;", "constexpr float kHuge = 0x1p120f;", HUGE),
    Fault("sm90-huge-scores-half-shifted", "S[j][h * 2] -= shift[h];", "", HUGE),
    Fault("sm90-huge-rows-not-told", "{-statistics.rows[h].total, shift[h]}", "{statistics.rows[h].total, shift[h]}", HUGE),
    Fault("sm90-output-not-cleared", "pair[i % 2 * 2] = pair[i % 2 * 2 + 1] = 0.0f;", "", MANY),
]
