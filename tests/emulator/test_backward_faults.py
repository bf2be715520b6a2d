"""Planted faults of the generic backward kernels, each caught on the CPU: by the numerics rule, or by the emulator's checks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulatedKernel, EmulationOrder, Schedule
from flashgen.codegen.families.attention_backward import FAMILY
from flashgen.codegen.families.attention_backward.config import AttentionBackwardConfig
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from flashgen.verification import cases
from flashgen.verification.expected import Expected
from flashgen.verification.screen import Screen
from tests.support.plan import planned, to_run
from tests.support.runs import COMPILE_SECONDS, LIMITS, compile_ahead, emulated_kernel, emulated_text

TARGET = find_target("sm_90a")
ORDER = EmulationOrder(Schedule.ROUND_ROBIN, late_copies=True)
ONE_STAGE, TWO_STAGES = AttentionBackwardConfig(64, 64, 32, 4, 1, 16, 1), AttentionBackwardConfig(64, 64, 32, 4, 1, 16, 2)
SHARED_KEYS = AttentionBackwardConfig(64, 64, 32, 4, 2, 16, 1)  # by two warps


@dataclass(frozen=True)
class Setting:
    """A kernel, and the sizes that it is launched on: batch, heads_q, heads_kv, len_q, len_kv.

    special: whether the input is the screen's case of these sizes
    lowered: whether all scores are far below 0: a P that belongs to none of them overflows
    peaked: whether most rows have nearly all their probability at one key, so that their dS nearly vanishes
    """

    sizes: tuple[int, int, int, int, int]
    mask: Mask = Mask.CAUSAL
    config: AttentionBackwardConfig = ONE_STAGE
    special: bool = False
    lowered: bool = False
    peaked: bool = False

    @property
    def spec(self) -> KernelSpec:
        """The kernel without a fault."""
        return KernelSpec(FAMILY, Problem(Dtype.BF16, 64, 64, self.mask, "backward"), self.config, TARGET)

    def why_rejected(self, kernel: EmulatedKernel) -> str:
        """What the numerics rule or a check of the emulator says, empty if nothing."""
        try:
            if self.special:
                results = Screen(self.spec.problem, "cpu", (), special=(self.sizes,)).judge(kernel)
                return "; ".join(result.verdict.message for result in results if not result.verdict.ok)
            tensors = Tensors.random(self.spec.problem, Workload(*self.sizes), torch.Generator().manual_seed(3)).apart()
            if self.lowered:
                tensors["q"].mul_(0.1).add_(8)
                tensors["k"].mul_(0.1).sub_(4)
                tensors.derive()
            if self.peaked:
                tensors["q"].mul_(16)
                tensors.derive()
                tensors = tensors.without_optional_inputs()
            run_on_cpu(kernel, tensors, interleaving=ORDER, limits=LIMITS)
            verdict = Expected.of(tensors).judge(tensors)
            return "" if verdict.ok else verdict.message
        except EmulatorFaultError as error:
            return str(error)


@dataclass(frozen=True)
class Fault:
    """Replaces `find`, which must occur exactly once in the text, by `replace`. `check`: what the emulator says, where it catches it."""

    name: str
    find: str
    replace: str
    setting: Setting
    check: str = ""

    @property
    def kernel(self) -> str:
        """The suffix of the kernel that has the fault."""
        return next(suffix for suffix, faults in BY_KERNEL.items() if self in faults)

    def text(self) -> Source:
        """With the fault."""
        source = emulated_text(self.setting.spec)
        found = source.text.count(self.find)
        assert found == 1, f"fault {self.name} must find its text once; found it {found} times: {self.find!r}"
        return Source(source.entry, source.text.replace(self.find, self.replace))


CAUSAL, FULL = Setting((1, 4, 2, 130, 150)), Setting((1, 4, 2, 130, 150), Mask.FULL)
TWO = Setting((1, 2, 1, 200, 100), config=TWO_STAGES)
SHARED = Setting((1, 2, 1, 130, 100), config=SHARED_KEYS)
HUGE = Setting(cases.HUGE, special=True)
FAR = Setting(cases.FAR, special=True)
FEW_KEYS = Setting((1, 2, 1, 70, 6))
PEAKED = Setting((1, 2, 1, 130, 6), peaked=True)

_IN_FLIGHT = "read under an asynchronous copy that was not waited for"
_OVERWRITE, _UNORDERED = "write over what another warp may still read", "no barrier between"

ROWS = [
    Fault("delta-of-another-row", "row_delta[row] = exists", "row_delta[row ^ 1] = exists", CAUSAL),
    Fault("delta-without-d-lse", "product - (d_lse == nullptr ? 0.0f : d_lse[row])", "product", CAUSAL),
    Fault(
        "delta-of-half-the-lanes", "for (int distance = 1; distance < kRowLanes;", "for (int distance = 2; distance < kRowLanes;", CAUSAL
    ),
    Fault("lse-not-in-base-2", "infinity() : lse * 1.44269504f", "infinity() : lse", CAUSAL),
    Fault("row-without-keys-not-hidden", "lse == -infinity() ? infinity() :", "false ? infinity() :", Setting((1, 2, 1, 130, 50))),
    Fault(
        "sums-not-zeroed",
        "write_zeros<kThreads, kBlockQ * kColumns>(",
        "if (false) write_zeros<kThreads, kBlockQ * kColumns>(",
        CAUSAL,
    ),
    Fault(
        "half-of-the-sums-zeroed",
        "for (int i = thread_index() * 4; i < kCount;",
        "for (int i = thread_index() * 4; i < kCount / 2;",
        CAUSAL,
    ),
    Fault("huge-rows-not-told", "p.huge_tiles[tile] = huge;", "p.huge_tiles[tile] = 0;", HUGE),
    Fault("huge-rows-not-summed-again", "if (huge_row) row_lse[row] = log_sum_exp(", "if (false) row_lse[row] = log_sum_exp(", HUGE),
    Fault("shift-of-another-row", "row_shift[row] = huge_row ?", "row_shift[row ^ 1] = huge_row ?", HUGE),
    Fault("ordinary-rows-shifted", "row_shift[row] = huge_row ? own.maximum : 0.0f;", "row_shift[row] = own.maximum;", HUGE),
    Fault("few-keys-not-gone-through", "huge || len_kv <= kFewKeys", "huge", PEAKED),
    Fault("exact-delta-of-another-row", "row_delta[row] = own.d_p", "row_delta[row ^ 1] = own.d_p", FEW_KEYS),
    Fault("exact-delta-not-normalised", "own.d_p * normaliser(own.row_sum)", "own.d_p", FEW_KEYS),
    Fault("exact-delta-without-d-lse", "(p.d_lse == nullptr ? 0.0f : p.d_lse[index])", "0.0f", FEW_KEYS),
    Fault("keys-unseen-in-exact-delta", "if (chain.visible(query + e % 2, first_key + lane", "if (true || (lane", FEW_KEYS),
    Fault("maximum-not-followed-in-exact-delta", "d_p * own + other.d_p * others}", "d_p + other.d_p}", PEAKED),
    Fault("columns-of-another-lane", "(upper ? low : high) = other;", "(upper ? high : low) = other;", FEW_KEYS),
]
GRADIENTS = [
    Fault("mask-one-key-too-many", "return key <= query + causal_offset;", "return key <= query + causal_offset + 1;", CAUSAL),
    Fault("mask-one-key-too-few", "return key <= query + causal_offset;", "return key < query + causal_offset;", CAUSAL),
    Fault("keys-past-the-end-seen", "return key < len_kv;", "return true;", Setting((1, 1, 1, 130, 70), Mask.FULL, lowered=True)),
    Fault("query-tile-skipped", "return {all.begin / kBlockQ,", "return {all.begin / kBlockQ + 1,", CAUSAL),
    Fault("last-query-tile-skipped", "(all.end + kBlockQ - 1) / kBlockQ}", "all.end / kBlockQ}", CAUSAL),
    Fault("crossed-tile-not-masked", "(all.full_begin + kBlockQ - 1) / kBlockQ,", "all.full_begin / kBlockQ,", CAUSAL),
    Fault("scale-not-applied", "ex2_approx_ftz(fmaf(s[i][j][e], scale_log2,", "ex2_approx_ftz(fmaf(s[i][j][e], 1.0f,", FULL),
    Fault("lse-of-the-other-query", "scale_log2, -lse[e % 2])", "scale_log2, -lse[0])", FULL),
    Fault("stale-delta", "(dp[i][j][e] - delta[e % 2])", "(dp[i][j][e] - delta[0])", FULL),
    Fault(
        "delta-of-the-first-step", "differentiate(dP, S, here.row_delta() + first * 4);", "differentiate(dP, S, here.row_delta());", FULL
    ),
    Fault("dS-without-P", "= P[i][j][e] * (dp", "= (dp", FULL),
    Fault(
        "dK-not-scaled",
        "store_columns<Element>(key_tile, first_row, dK, p.scale,",
        "store_columns<Element>(key_tile, first_row, dK, 1.0f,",
        FULL,
    ),
    Fault("dV-scaled", "first_row, dV, 1.0f,", "first_row, dV, p.scale,", FULL),
    Fault("dK-of-the-wrong-head", "batch(batch), head(head_kv * p.group)", "batch(batch), head(head_kv)", FULL),
    Fault(
        "dK-of-one-head-of-the-group",
        "if (++tile == tiles.end) tile = tiles.begin, ++head;\n    }\n};",
        "if (++tile == tiles.end) tile = tiles.begin;\n    }\n};",
        FULL,
    ),
    Fault(
        "dQ-of-the-wrong-head",
        "if (++tile == tiles.end) tile = tiles.begin, ++head;\n    }\n\n",
        "if (++tile == tiles.end) tile = tiles.begin;\n    }\n\n",
        FULL,
    ),
    Fault("dQ-of-the-wrong-rows", "row_tile_dq, dQ, query_columns);", "row_tile_dq ^ 1, dQ, query_columns);", FULL),
    Fault(
        "dQ-added-twice",
        "red_add_f32_v4(d_q_sum + lane_index() * 4, d);",
        "for (int i = 0; i < 2; ++i) red_add_f32_v4(d_q_sum + lane_index() * 4, d);",
        FULL,
    ),
    Fault(
        "keys-of-dQ-left-out",
        "slice < ScoreTile::kRowCount / 16;",
        "slice < ScoreTile::kRowCount / 32;",
        FULL,
    ),
    Fault("huge-scores-not-shifted", "if (unlikely(huge)) shift_transposed(", "if (false) shift_transposed(", HUGE),
    Fault(
        "rows-32-bits",
        "batch * strides.batch + head * strides.head + row * strides.row;\n    }\n    template",
        "static_cast<int>(batch * strides.batch + head * strides.head + row * strides.row);\n    }\n    template",
        FAR,
    ),
]
SUMS = [
    Fault("dQ-not-scaled", "__uint_as_float(bits[e]) * scale;", "__uint_as_float(bits[e]);", FULL),
    Fault(
        "dQ-added-in-another-order-than-read",
        "gradient_offset<kColumns>(row_tile + i, columns.pair(j / 2) * 2 + j % 2)",
        "gradient_offset<kColumns>(row_tile + i, columns.pair(j / 2) * 2 + 1 - j % 2)",
        FULL,
    ),
    Fault("dQ-of-another-warp", "gradient_offset<kColumns>(warp, j)", "gradient_offset<kColumns>(warp ^ 1, j)", FULL),
]
_FIRST_BARRIER = "barrier_sync();  // Q and dO of this tile are here"
_SECOND_BARRIER = "barrier_sync();  // dS of all warps is here"
_WAIT = "        cp_async_wait_group<0>();\n        barrier_sync();  // Q and dO"
RACES = [
    Fault("barrier-before-dS-is-read", _SECOND_BARRIER, "//", CAUSAL, _UNORDERED),
    Fault("barrier-before-a-tile-is-used", _FIRST_BARRIER, "//", TWO, _IN_FLIGHT),
    Fault("wait-for-Q-and-dO", _WAIT, "        barrier_sync();  // Q and dO", CAUSAL, _IN_FLIGHT),
    Fault("barrier-before-a-stage-is-loaded", "if (kStages == 1) barrier_sync();", "", SHARED, _OVERWRITE),
    Fault("stage-in-use-loaded", "stage.base = stages.base + Stage::kBytes - (stage.base - stages.base);", "", TWO, _IN_FLIGHT),
    Fault("barrier-before-dK-takes-the-place-of-K", "barrier_sync();  // nobody reads K and V", "//", FULL, _OVERWRITE),
    Fault("barrier-before-dK-is-stored", "value_columns);\n    barrier_sync();", "value_columns);", FULL, _UNORDERED),
]
BY_KERNEL = {"_preprocess": ROWS, "": [*GRADIENTS, *RACES], "_postprocess": SUMS}
FAULTS = [fault for faults in BY_KERNEL.values() for fault in faults]


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    """All texts, on all cores."""
    planted = [params["fault"] for params in to_run(request)]
    compile_ahead(text for fault in planted for text in (emulated_text(fault.setting.spec), fault.text()))


@cache
def rejected_without_a_fault(setting: Setting) -> str:
    return setting.why_rejected(emulated_kernel(setting.spec))


@pytest.mark.parametrize(
    "fault",
    planned(
        FAULTS,
        2,
        family=lambda fault: fault.setting.spec.family.name,
        kinds=lambda fault: (fault.kernel, fault.check),
        name=lambda fault: fault.name,
        seconds=lambda fault: 2 * COMPILE_SECONDS,
        fault=True,
    ),
)
def test_caught(fault: Fault) -> None:
    assert not rejected_without_a_fault(fault.setting)
    why = fault.setting.why_rejected(emulated_kernel(fault.setting.spec, fault.text()))
    assert why, f"fault {fault.name} was accepted"
    assert fault.check in why


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
