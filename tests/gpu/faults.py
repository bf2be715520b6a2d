"""Planted faults: patches on the rendered text of a kernel, each with inputs on which the numerics rule must reject it.

A patch that no longer applies is an error: whoever changes the templates moves the fault along.
No patch reads or writes outside the buffers of `cases.Poisoned`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.families.attention_forward import FAMILY, AttentionForwardConfig, QueryPlace
from flashgen.codegen.problem import Dtype, Mask, Problem, Workload
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target
from tests.gpu.cases import Case, Layout


class FaultError(FlashgenError):
    """A patch does not apply."""


@dataclass(frozen=True)
class Setting:
    """A kernel, and the inputs that it is launched on."""

    config: AttentionForwardConfig
    cases: tuple[Case, ...]

    def spec(self, target: Target) -> KernelSpec:
        """The kernel without a fault."""
        return KernelSpec(FAMILY, self.cases[0].problem, self.config, target)


@dataclass(frozen=True)
class Fault:
    """Replaces `find`, which must occur exactly once, by `replace`. A `race` need not show at each launch.

    `also` holds further replacements, harmless by themselves, that give a race time to show.
    """

    name: str
    find: str
    replace: str
    setting: Setting
    race: bool = False
    also: tuple[tuple[str, str], ...] = ()

    def apply(self, source: Source) -> Source:
        """The faulty text. Raises FaultError if a text to replace does not occur exactly once."""
        text = source.text
        for find, replace in ((self.find, self.replace), *self.also):
            found = text.count(find)
            if found != 1:
                raise FaultError(f"fault {self.name} must find its text once in {source.entry}; found it {found} times: {find!r}")
            text = text.replace(find, replace)
        return Source(source.entry, text)


def _setting(
    *sizes: tuple[int, int],
    mask: Mask = Mask.FULL,
    dtype: Dtype = Dtype.FP16,
    width: tuple[int, int] = (64, 64),
    heads: tuple[int, int] = (4, 2),
    batch: int = 2,
    magnitude: float = 2.0,
    layout: Layout = Layout.DENSE,
    offset: float = 0.0,
    config: tuple[int, int, int, int] = (64, 64, 4, 2),
    query: QueryPlace = QueryPlace.SHARED,
) -> Setting:
    problem = Problem(dtype, *width, mask)
    workloads = [Workload(batch, *heads, *lengths) for lengths in sizes]
    cases = (Case(w.name, problem, w, width[0] ** -0.5, magnitude, (layout,) * 4, seed=11, offset=offset) for w in workloads)
    return Setting(AttentionForwardConfig(*config, query), tuple(cases))


# fp16 where nothing else is said: its rounding hides the least.
FULL = _setting((300, 1000), (65, 200))
CAUSAL = _setting((700, 700), (300, 500), mask=Mask.CAUSAL)
# Three rows in four see no key, and many of them share a block with one that does.
UNSEEN = _setting((400, 100), (150, 70), mask=Mask.CAUSAL)
PADDED = _setting((200, 300), width=(72, 72), layout=Layout.PADDED)
TAIL = _setting((100, 70), (100, 129))

# Races show where many warps run apart and much memory is under way: one stage, so that each tile is waited for at once.
RACE = _setting((2048, 2048), (8192, 128), heads=(16, 16), batch=4, config=(256, 48, 16, 1))
RACE_REGISTERS = _setting((8192, 64), (2048, 640), heads=(16, 16), batch=4, config=(128, 64, 8, 1), query=QueryPlace.REGISTERS)
# K is small and V large, so that most of the output tile takes the place of V, which slow warps read last.
RACE_OUTPUT = _setting(
    (8192, 128), (8192, 256), heads=(16, 16), batch=4, width=(16, 128), config=(128, 128, 8, 1), query=QueryPlace.REGISTERS
)
# Waits: K and V of each block come from DRAM (142 MB in all, more than any L2), and between the loads of K and V lies little work.
WAIT = {stages: _setting((128, 256), heads=(16, 16), batch=64, width=(16, 256), config=(128, 16, 8, stages)) for stages in (1, 2)}

_STEP_END = "slot = (slot + 1) % kStages;"

SOFTMAX = [
    Fault(
        "normalised-tile-by-tile",
        "const float before = mul_rn(sum[i][h], factor_of_sum);",
        """float total = partial + shfl_sync_bfly(partial, 1);
                total += shfl_sync_bfly(total, 2);
                for (int j = 0; j < kKeyTiles; ++j)
                    for (int e = h * 2; e < h * 2 + 2; ++e) scores[i][j][e] /= total;
                partial /= total;
                const float before = sum[i][h] * factor_of_sum;""",
        FULL,
    ),
    Fault("output-not-rescaled", "out[i][j][e] *= factor;", "out[i][j][e] *= 1.0f;", FULL),
    Fault("sum-not-rescaled", "mul_rn(sum[i][h], factor_of_sum)", "sum[i][h]", FULL),
    Fault("maximum-of-half-the-lanes", "highest = fmaxf(highest, shfl_sync_bfly(highest, 2));", "", FULL),
    Fault("sum-of-half-the-lanes", "total += shfl_sync_bfly(total, 2);", "", FULL),
    Fault("lse-base-2", "-infinity() : log_sum_exp(", "-infinity() : 1.442695f * log_sum_exp(", FULL),
    Fault("lse-without-scale", "log_sum_exp(maximum[i][h], total, scale,", "log_sum_exp(maximum[i][h], total, 1.0f,", FULL),
    Fault("scale-not-applied", "softmax.update(scores, accumulator, p.scale_log2)", "softmax.update(scores, accumulator, 1.442695f)", FULL),
    Fault("scale-applied-twice", "fmaf(scores[i][j][e], scale_log2,", "fmaf(scores[i][j][e] * scale_log2, scale_log2,", FULL),
    Fault("guard-of-the-maximum", "highest == -infinity() ? 0.0f : mul_rn(highest, scale_log2)", "highest * scale_log2", UNSEEN),
    Fault("guard-of-the-sum", "total == 0.0f ? 0.0f : 1.0f / total", "1.0f / total", UNSEEN),
]

MASK = [
    Fault("mask-one-key-too-many", "kCausal ? min(len_kv, query + 1 + diagonal)", "kCausal ? min(len_kv, query + 2 + diagonal)", CAUSAL),
    Fault("mask-one-key-too-few", "kCausal ? min(len_kv, query + 1 + diagonal)", "kCausal ? min(len_kv, query + diagonal)", CAUSAL),
    Fault("mask-aligned-top-left", "const int diagonal = p.len_kv - p.len_q;", "const int diagonal = 0;", CAUSAL),
    Fault("one-key-past-the-end", "lane % 4 * 2 + e % 2 >= end", "lane % 4 * 2 + e % 2 > end", TAIL),
    Fault("tail-not-masked", "return {seen_by_first / kBlockKv,", "return {(seen_by_first + kBlockKv - 1) / kBlockKv,", TAIL),
    Fault("last-tile-skipped", "int tile = key_tiles.end - 1,", "int tile = key_tiles.end - 2,", FULL),
    Fault(
        "first-tile-skipped", "for (; tile >= 0; --tile) step(/*masked=*/false);", "for (; tile >= 1; --tile) step(/*masked=*/false);", FULL
    ),
]

ROUNDING = [
    Fault("truncating-conversion", "cvt.rn.f16x2.f32", "cvt.rz.f16x2.f32", _setting((300, 1000), magnitude=1.0, offset=1500.0)),
    Fault(
        "accumulator-in-fp16",
        _STEP_END,
        """for (auto& tiles : accumulator)
            for (auto& four : tiles)
                for (float& x : four) {
                    u16 half;
                    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
                    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
                }
        """
        + _STEP_END,
        _setting((300, 500), offset=1500.0, config=(64, 16, 4, 2)),
    ),
    Fault(
        "accumulator-in-bf16",
        _STEP_END,
        """for (auto& tiles : accumulator)
            for (auto& four : tiles)
                for (float& x : four) x = __uint_as_float(cvt_rn_x2<Bf16>(0.0f, x) & 0xffff0000u);
        """
        + _STEP_END,
        _setting((300, 2000), dtype=Dtype.BF16, offset=190.0),
    ),
]

PLACES = [
    Fault("wrong-head-under-gqa", "work.head / p.group", "work.head % (p.heads_q / p.group)", FULL),
    Fault("batch-stride-ignored", "sequence_rows(p.k, work.batch,", "sequence_rows(p.k, 0,", FULL),
    Fault("values-one-row-off", "v + first_key * p.v_row", "v + max(0, first_key - 1) * p.v_row", FULL),
    Fault("stale-slot", "slot = (slot + 1) % kStages;", "", FULL),
    Fault(
        "load-without-swizzle",
        "cp_async_16(cover.address(tile, pass), source, valid)",
        "cp_async_16(tile.base + ((pass * Cover::kRowsPerPass + cover.row) * kColumns + cover.chunk * 8) * 2, source, valid)",
        FULL,
    ),
    Fault(
        "keys-read-without-swizzle",
        "const auto place = keys.place(lane / 16 * 8 + lane % 8, lane / 8 % 2);",
        "auto place = keys.place(0, lane / 8 % 2);\n    place.row += (lane / 16 * 8 + lane % 8) * kColumns * 2;",
        FULL,
    ),
    Fault("values-read-with-wrong-swizzle", "values.place(lane_index() % 16,", "values.place(lane_index() % 16 ^ 1,", FULL),
    Fault(
        "columns-past-the-end-read",
        "load_tile_async<kThreads, kHeadDim>(destination",
        "load_tile_async<kThreads, kColumns>(destination",
        PADDED,
    ),
    Fault("columns-past-the-end-written", "store_tile<kThreads, kHeadDimV>(out", "store_tile<kThreads, kColumnsV>(out", PADDED),
    Fault("lse-past-the-end-written", "if (lane % 4 == 0 && row < rows_valid)", "if (lane % 4 == 0)", TAIL),
]

_KEYS = "barrier_sync();  // these keys are here, and nobody reads the values of the previous tile any more"
_VALUES = "barrier_sync();  // these values are here, and nobody reads these keys any more"
_WAIT = "cp_async_wait_group<2 * kStages - 2>();\n        "
_SHORT = "cp_async_wait_group<2 * kStages - 1>();\n        "

RACES = [
    Fault("barrier-before-keys", _KEYS, "", RACE, race=True),
    Fault("barrier-before-values", _VALUES, "", RACE, race=True),
    Fault(
        "barrier-before-output",
        "barrier_sync();  // nobody reads shared memory any more, and nothing is on its way there",
        "",
        RACE_OUTPUT,
        race=True,
        also=(("        gemm_output<Element>(", "        if (warp_index() % 2) __nanosleep(2000);\n        gemm_output<Element>("),),
    ),
    Fault(
        "barrier-before-store",
        "accumulator);\n    barrier_sync();\n    store_tile",
        "accumulator);\n    store_tile",
        RACE,
        race=True,
        also=(("    stage_output<Element>(out_tile", "    if (warp_index() % 2) __nanosleep(2000);\n    stage_output<Element>(out_tile"),),
    ),
    Fault(
        "barrier-before-query-fragments", "barrier_sync();\n    const QueryInRegisters", "const QueryInRegisters", RACE_REGISTERS, race=True
    ),
    Fault("wait-for-keys-removed", _WAIT + _KEYS, _KEYS, WAIT[1], race=True),
    Fault("wait-for-values-removed", _WAIT + _VALUES, _VALUES, WAIT[1], race=True),
    Fault("wait-for-keys-one-group-short", _WAIT + _KEYS, _SHORT + _KEYS, WAIT[2], race=True),
    Fault("wait-for-values-one-group-short", _WAIT + _VALUES, _SHORT + _VALUES, WAIT[2], race=True),
]

FAULTS = [*SOFTMAX, *MASK, *ROUNDING, *PLACES, *RACES]
