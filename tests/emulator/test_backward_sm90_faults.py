"""Faults planted in both Hopper backward families, each caught on the CPU: by the numerics rule, or by the check for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.codegen.problem import Mask
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from tests.support.backward_sm90 import BackwardCase
from tests.support.plan import planned, to_run
from tests.support.runs import compile_ahead, emulated_kernel, emulated_text

SHORT = BackwardCase((290, 150))
FEW_KEYS = BackwardCase((70, 40), heads=(4, 2))
GROUPED = BackwardCase((200, 150), heads=(4, 2))
CAUSAL = BackwardCase((290, 300), mask=Mask.CAUSAL)
STEPPED = BackwardCase((290, 300), (128, 128), Mask.CAUSAL, block_q=64)
TWO_PANELS = BackwardCase((200, 150), (128, 128), block_q=80)
WIDE = BackwardCase((200, 100), (192, 136))
WIDE_ODD = BackwardCase((150, 100), (192, 136), heads=(1, 1))  # its last query tile is in the stage that the output goes through

_RULE = "the numerics rule"
_NO_FENCE = "missing proxy fence"
_NO_BARRIER = "read of what another thread wrote, with no barrier between"
_NOT_WRITTEN = "read of shared memory that nobody wrote"
_NO_WAIT = "read under an asynchronous copy that was not waited for"
_UNDER_PRODUCT = "write under a matrix product"
_FENCED = "        fence_proxy_async();\n        bar_sync(kDScoresReady, kWarpgroups * 128);\n"
_BARRIER = "        bar_sync(kDScoresReady, kWarpgroups * 128);\n"


@dataclass(frozen=True)
class Planted:
    """Replaces `find`, which occurs once in the text, by `replace`; the fault is `caught` so on the case."""

    name: str
    find: str
    replace: str
    case: BackwardCase = SHORT
    caught: str = _RULE

    def text(self) -> Source:
        """With the fault."""
        source = emulated_text(self.case.spec())
        assert source.text.count(self.find) == 1, f"{self.name} must find its text once: {self.find!r}"
        return Source(source.entry, source.text.replace(self.find, self.replace))


ORDER = [
    Planted("fence-before-dS-removed", _FENCED, _BARRIER, caught=_NO_FENCE),
    Planted("fence-before-dS-too-late", _FENCED, _BARRIER + "        fence_proxy_async();\n", caught=_NO_FENCE),
    Planted("barrier-of-dS-removed", _BARRIER, "", caught=_NO_BARRIER),
    Planted("dS-in-one-stage", "d_scores + d_scores_order.stage * DScoresTile::kBytes", "d_scores", caught=_UNDER_PRODUCT),
    Planted("wait-for-Q-removed", "        inputs.query_pipeline.wait_full(next);\n", "", caught="with no wait for its mbarrier"),
    Planted("wait-for-dO-removed", "        inputs.d_out_pipeline.wait_full(next);\n", "", caught=_NO_WAIT),
    Planted("stage-of-Q-overwritten", "query_pipeline.wait_empty(order);", "", caught="all 1 have arrived already"),
    Planted("Q-never-released", "release(inputs.query_pipeline);", "", caught="8 arrivals and 0 bytes"),
    Planted("row_lse-not-announced", "Query::kBytes + Lse::kBytes +", "Query::kBytes +", caught="nobody announced"),
    Planted("too-much-announced", "DOut::kBytes + kDeltaBytes +", "DOut::kBytes + 2 * kDeltaBytes +", caught="0 arrivals and"),
    Planted("dK-not-waited-for", "        wgmma_wait_group<0>();\n        keep_in_registers(dK);\n", "", caught=_UNDER_PRODUCT),
    Planted(
        "row_lse-of-the-other-stage",
        "exponentiate(S, p.scale_log2, inputs.lse(order.stage))",
        "exponentiate(S, p.scale_log2, inputs.lse(order.stage ^ 1))",
        caught="",
    ),
]
NUMBERS = [
    Planted("dQ-not-waited-for", "        wgmma_wait_group<kSplit ? 2 : 1>();\n        keep_in_registers(d_q.dQ);\n", ""),
    Planted("no-mask", "if (tiles.needs_mask(next.tile)) mask", "if (false) mask", CAUSAL),
    Planted("mask-of-the-first-warpgroup", "int first_key = work.first_key + warpgroup * 64", "int first_key = work.first_key", STEPPED),
    Planted("first-query-tile-skipped", "return {all.begin / kBlockQ,", "return {all.begin / kBlockQ + 1,", CAUSAL),
    Planted("dK-not-scaled", "{p.scale, p.scale}", "{1.0f, 1.0f}"),
    Planted("dV-scaled", "{1.0f, 1.0f}", "{p.scale, p.scale}"),
    Planted("dQ-not-scaled", "gradient.store(rows, warp_index(), p.scale);", "gradient.store(rows, warp_index(), 1.0f);"),
    Planted("queries-of-the-first-head", "queries_full, row, next.head,", "queries_full, row, work.head_kv * p.group,", GROUPED),
    Planted(
        "dQ-of-the-first-head",
        "index += p.query_tiles - work.tiles.count();",
        "index -= work.tiles.count();",
        GROUPED,
    ),
    Planted("dQ-of-the-first-panel", "min(warpgroup, KeyTile::kPanels - 1)", "0", TWO_PANELS),
    Planted("dQ-of-the-first-queries", "dS.columns(warpgroup * 64, step)", "dS.columns(0, step)"),
    Planted(
        "dS-in-the-columns-of-a-warpgroup",
        "store_transposed(d_scores_tile, warp * 16, dS);",
        "store_transposed(d_scores_tile, warp % 4 * 16, dS);",
        caught="write over what another thread wrote, with no barrier between",
    ),
    Planted("dQ-begins-with-what-was-there", "    write_zeros<kThreads, kSums>(p.d_q_sum + place * kSums);\n", ""),
    Planted("exact-delta-of-another-row", "row_delta[row] = own.d_p", "row_delta[row ^ 1] = own.d_p", FEW_KEYS),
    Planted("exact-delta-of-the-first-key-step", "first_key < rows.k.count;", "first_key < 16;", FEW_KEYS),
    Planted("row_lse-in-base-e", "lse * 1.44269504f;", "lse;"),
    Planted("delta-not-subtracted", "(dp[i][j][e] - delta[e % 2])", "dp[i][j][e]"),
    Planted(
        "P-in-the-place-of-dS",
        "gemm_over_queries<Element, 0, kSteps>(dK, dS, queries);",
        "gemm_over_queries<Element, 0, kSteps>(dK, P, queries);",
    ),
    Planted("fragments-swapped", "operand[j / 2][j % 2 * 2 + h]", "operand[j / 2][h * 2 + j % 2]"),
]
_P_STORED = "        store_transposed(stages.p_tile(), warp * 16, P);\n        fence_proxy_async();\n"
_DS_STORED = "        store_transposed(stages.d_s_tile(), warp * 16, dS);\n        fence_proxy_async();\n"
_P_BARRIER = "        bar_sync(kPReady, kConsumers);\n"
_DV_DONE = "        wgmma_wait_group<0>();\n        keep_in_registers(dV);\n"
WIDE_ORDER = [
    Planted("wide-fence-after-P-removed", _P_STORED, _P_STORED.split("        fence")[0], WIDE, _NO_FENCE),
    Planted("wide-fence-after-dS-removed", _DS_STORED, _DS_STORED.split("        fence")[0], WIDE, _NO_FENCE),
    Planted("wide-barrier-of-P-removed", _P_BARRIER, "", WIDE, _NO_BARRIER),
    Planted("wide-barrier-of-dS-removed", "        bar_sync(kDScoresReady, kConsumers);\n", "", WIDE, _NOT_WRITTEN),
    Planted("wide-P-while-dV-is-computed", _DV_DONE, "", WIDE, _UNDER_PRODUCT),
    Planted("wide-barrier-before-output-removed", "bar_sync(kPReady, kConsumers);  //", "//", WIDE_ODD, _UNDER_PRODUCT),
    Planted("wide-dK-not-waited-for", "        wgmma_wait_group<0>();\n        keep_in_registers(dK);\n", "", WIDE, _UNDER_PRODUCT),
]
WIDE_NUMBERS = [
    Planted("wide-dQ-of-the-first-part", "        keys.base += part * KeyTile::kPanelBytes;\n", "", WIDE),
    Planted("wide-dK-of-the-first-columns", "columns_from<Share::kFirst>(stages.query_tile(stage))", "stages.query_tile(stage)", WIDE),
    Planted(
        "wide-dV-of-the-first-columns",
        "columns_from<ShareV::kFirst>(stages.d_out_tile(order.stage))",
        "stages.d_out_tile(order.stage)",
        WIDE,
    ),
    Planted("wide-output-in-the-first-columns", "kFirst + first * 8, row", "first * 8, row", WIDE),
    Planted("wide-delta-not-subtracted", "low * (dP[j][h * 2] - delta[0])", "low * dP[j][h * 2]", WIDE),
]
QUICK_ORDER, QUICK_NUMBERS = 1, 1  # for every run; --slow has all


def listed(faults: list[Planted], each: int) -> list[object]:
    """As parameters, of which every run has `each`."""
    return planned(
        faults,
        each,
        family=lambda fault: fault.case.family.name,
        kinds=lambda fault: (fault.case, fault.caught),
        name=lambda fault: fault.name,
        seconds=lambda fault: fault.case.seconds,
        fault=True,
    )


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    """All texts, on all cores."""
    planted = [params["fault"] for params in to_run(request) if "fault" in params]
    compile_ahead(text for fault in planted for text in (emulated_text(fault.case.spec()), fault.text()))


@cache
def sound_kernel(spec: KernelSpec) -> EmulatedKernel:
    return emulated_kernel(spec)


def caught_by(fault: Planted) -> str:
    """What rejects the faulty kernels, empty if nothing does."""
    assert not fault.case.why_rejected(sound_kernel(fault.case.spec())), "the kernel without the fault is rejected"
    try:
        why = fault.case.why_rejected(emulated_kernel(fault.case.spec(), fault.text()))
    except EmulatorFaultError as error:
        return str(error)
    return why and f"{_RULE}: {why}"


@pytest.mark.parametrize("fault", [*listed([*ORDER, *WIDE_ORDER], QUICK_ORDER), *listed([*NUMBERS, *WIDE_NUMBERS], QUICK_NUMBERS)])
def test_caught(fault: Planted) -> None:
    caught = caught_by(fault)
    assert caught, f"fault {fault.name} was accepted"
    assert fault.caught in caught


def test_names_are_unique() -> None:
    names = [fault.name for fault in (*ORDER, *NUMBERS, *WIDE_ORDER, *WIDE_NUMBERS)]
    assert len(set(names)) == len(names)
