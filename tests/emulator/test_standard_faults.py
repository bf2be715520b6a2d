"""Planted faults of standard attention, each caught on the CPU: by the numerics rule, or by the emulator's checks."""

from __future__ import annotations

from functools import cache, partial

import pytest

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulatedKernel, EmulationOrder, Schedule
from flashgen.codegen.families.standard_attention.config import StandardAttentionConfig
from flashgen.codegen.problem import Dtype, Mask
from flashgen.codegen.render import Atoms, Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from tests.support.cases import Case, Layout
from tests.support.fault import Fault, setting
from tests.support.plan import planned, to_run
from tests.support.runs import compile_ahead, emulated_kernel, emulated_text, seconds_of, why_rejected

TARGET = find_target("sm_90a")
ORDERS = (EmulationOrder(Schedule.ROUND_ROBIN, late_copies=True),)
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

_IN_FLIGHT = "read under an asynchronous copy that was not waited for"
_OVERWRITE = "write over what another warp may still read, with no barrier between"
_TWICE = "write over what another thread wrote, with no barrier between"
_NOT_WRITTEN = "read of shared memory that nobody wrote"

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
    _IN_FLIGHT: [
        Fault("wait-removed", _WAIT, "", FULL),
        Fault("wait-one-group-short", _WAIT, "cp_async_wait_group<kStages - 1>();", FULL),
    ],
    _OVERWRITE: [
        Fault("barrier-before-the-output", _OUTPUT_BARRIER, "//", WIDE),
        Fault("maxima-and-sums-in-one-place", "row_sum, sums,", "row_sum, maxima,", FULL),
    ],
    _TWICE: [Fault("output-in-the-place-of-another-warp", "OutTile{ring + warp_index() * OutTile::kBytes}", "OutTile{ring}", FULL)],
    _NOT_WRITTEN: [
        Fault("barrier-before-a-tile", _TILE_BARRIER, "//", FULL),
        Fault("barrier-before-the-warps-of-a-row", _ROW_BARRIER, "const SharedAddress of_row", FULL),
    ],
}
FAULTS = [*SCORES, *SOFTMAX, *OUTPUT, *(fault for faults in RACES.values() for fault in faults)]
PARTS = {fault.name: part for part, faults in enumerate((SCORES, SOFTMAX, OUTPUT)) for fault in faults}
QUICK, QUICK_RACES = 1, 0  # for every run; --slow has all


def listed(faults: list[Fault], each: int) -> list[object]:
    """As parameters, of which every run has `each`."""
    return planned(
        faults,
        each,
        family=lambda fault: fault.setting.spec(TARGET).family.name,
        kinds=lambda fault: (PARTS.get(fault.name),),
        name=lambda fault: fault.name,
        seconds=lambda fault: seconds_of(fault.setting.cases),
        fault=True,
    )


def faulty_text(fault: Fault) -> Source:
    return fault.apply(emulated_text(fault.setting.spec(TARGET)), Atoms.EMULATED)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    """All texts, on all cores."""
    planted = [params["fault"] for params in to_run(request)]
    compile_ahead(text for fault in planted for text in (emulated_text(fault.setting.spec(TARGET)), faulty_text(fault)))


@cache
def sound_kernel(spec: KernelSpec) -> EmulatedKernel:
    return emulated_kernel(spec)


@cache
def control(spec: KernelSpec, case: Case) -> str:
    """Why the kernel without a fault is rejected: empty, as it should be."""
    return why_rejected(sound_kernel(spec), case, ORDERS)


def caught_by(fault: Fault) -> str:
    """What rejects the faulty kernels, empty if nothing does."""
    spec = fault.setting.spec(TARGET)
    faulty = emulated_kernel(spec, faulty_text(fault))
    for case in fault.setting.cases:
        assert not control(spec, case), f"the kernel without the fault is rejected on {case.name}"
        try:
            if why := why_rejected(faulty, case, ORDERS):
                return f"the numerics rule: {why}"
        except EmulatorFaultError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("fault", listed([*SCORES, *SOFTMAX, *OUTPUT], QUICK))
def test_caught(fault: Fault) -> None:
    assert caught_by(fault), f"fault {fault.name} was accepted"


@pytest.mark.parametrize("fault", listed(FAULTS[-sum(map(len, RACES.values())) :], QUICK_RACES))
def test_a_race_is_caught_by_the_check_for_it(fault: Fault) -> None:
    (check,) = (check for check, faults in RACES.items() if fault in faults)
    caught = caught_by(fault)
    assert caught.startswith("shared memory: ")
    assert check in caught


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
