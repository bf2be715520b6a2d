"""Faults planted in the Hopper backward families, each caught on the CPU: by the numerics rule, or by the check for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.codegen.problem import Mask
from flashgen.codegen.render import Source
from tests.support.backward_sm90 import PAIR as PAIR_FAMILY
from tests.support.backward_sm90 import PERSISTENT as PERSISTENT_FAMILY
from tests.support.backward_sm90 import WIDE as WIDE_FAMILY
from tests.support.backward_sm90 import BackwardCase
from tests.support.plan import planned, to_run
from tests.support.runs import compile_ahead, emulated_kernel, emulated_text

SHORT = BackwardCase((290, 150))
FEW_KEYS = BackwardCase((70, 40), heads=(4, 2))
GROUPED = BackwardCase((200, 150), heads=(4, 2))
CAUSAL = BackwardCase((290, 300), mask=Mask.CAUSAL)
STEPPED = BackwardCase((290, 300), (128, 128), Mask.CAUSAL, block_q=64)
TWO_PANELS = BackwardCase((200, 150), (128, 128), block_q=80)
SHARED = BackwardCase((200, 150), (136, 64), block_q=64)  # an odd number of panels of dQ, the last of which is narrow
SHARED_EVENLY = BackwardCase((100, 150), (208, 40), block_q=48)
WIDE = BackwardCase((200, 100), (192, 136), family=WIDE_FAMILY)
PAIR = BackwardCase((200, 150), (208, 136), family=PAIR_FAMILY)
PERSISTENT = BackwardCase((200, 300), (128, 64), heads=(4, 2), family=PERSISTENT_FAMILY)
PERSISTENT_QUERIES = BackwardCase((290, 300), heads=(4, 2), family=PERSISTENT_FAMILY)  # dQ is not transposed
PAIR_CAUSAL = BackwardCase((300, 300), (208, 136), Mask.CAUSAL, family=PAIR_FAMILY)

_RULE = "the numerics rule"
_NO_FENCE = "missing proxy fence"
_NO_BARRIER = "read of what another thread wrote, with no barrier between"
_NOT_WRITTEN = "read of shared memory that nobody wrote"
_NO_WAIT = "read under an asynchronous copy that was not waited for"
_UNDER_PRODUCT = "write under a matrix product"
_FENCED = "            fence_proxy_async();\n            barrier();\n"
_BARRIER = "            barrier();\n"
_LSE = "                load_lse();\n"
_WAIT_BEFORE_ROWS = "                griddepcontrol_wait();\n" + _LSE
_WAIT = "    griddepcontrol_wait();\n"
_POSTPROCESS = "    postprocess<kBlockQ, DQ, QueryTile>(p);\n"


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
    Planted("fence-before-dS-too-late", _FENCED, _BARRIER + "            fence_proxy_async();\n", caught=_NO_FENCE),
    Planted("barrier-of-dS-removed", _BARRIER, "", caught=_NO_BARRIER),
    Planted("barrier-before-output-removed", "consumer.barrier();  //", "//", caught=_UNDER_PRODUCT),
    Planted("dS-in-one-stage", "return {dS + stage * DScoresTile::kBytes};", "return {dS};", caught=_UNDER_PRODUCT),
    Planted("wait-for-Q-removed", "        stages.query_pipeline.consumer_wait(next);\n", "", caught="with no wait for its mbarrier"),
    Planted("wait-for-dO-removed", "        stages.d_out_pipeline.consumer_wait(next);\n", "", caught="with no wait for its mbarrier"),
    Planted("stage-of-Q-overwritten", "query_pipeline.producer_acquire(state);", "", caught="all 1 have arrived already"),
    Planted("Q-never-released", "release(stages.query_pipeline);", "", caught="8 arrivals and 0 bytes"),
    Planted("row_lse-not-announced", "Query::kBytes + Lse::kBytes +", "Query::kBytes +", caught="nobody announced"),
    Planted("too-much-announced", "DOut::kBytes + kDeltaBytes +", "DOut::kBytes + 2 * kDeltaBytes +", caught="0 arrivals and"),
    Planted("dK-not-waited-for", "            wgmma_wait_group<0>();\n            launder(dK);\n", "", caught=_UNDER_PRODUCT),
    Planted(
        "row_lse-of-the-other-stage",
        "exponentiate(S, p.scale_log2, stages.lse(state.stage))",
        "exponentiate(S, p.scale_log2, stages.lse(state.stage ^ 1))",
        caught="",
    ),
]
OVERLAP = [
    Planted("wait-before-row_lse-removed", _WAIT_BEFORE_ROWS, _LSE),
    Planted("wait-before-row_lse-too-late", _WAIT_BEFORE_ROWS, _LSE + _WAIT_BEFORE_ROWS.removesuffix(_LSE)),
    Planted("wait-before-the-sums-of-dQ-removed", _WAIT + _POSTPROCESS, _POSTPROCESS, caught="has not waited for the launch"),
    Planted("wait-before-the-sums-of-dQ-too-late", _WAIT + _POSTPROCESS, _POSTPROCESS + _WAIT),
    Planted("nobody-waits", 'emulator::current->wait_for_launch("griddepcontrol_wait");', "", caught="has not waited for the launch"),
]
NUMBERS = [
    Planted("dQ-not-waited-for", "            wgmma_wait_group<kSplit ? 2 : 1>();\n            launder(d_q.dQ);\n", ""),
    Planted("no-mask", "if (tiles.needs_mask(next.tile)) mask", "if (false) mask", CAUSAL),
    Planted("mask-of-the-first-warpgroup", "int first_key = work.first_key + warpgroup * 64", "int first_key = work.first_key", STEPPED),
    Planted("first-query-tile-skipped", "return {all.begin / kBlockQ,", "return {all.begin / kBlockQ + 1,", CAUSAL),
    Planted("dK-not-scaled", "p.d_k_map, dK, p.scale,", "p.d_k_map, dK, 1.0f,"),
    Planted("dV-scaled", "p.d_v_map, dV, 1.0f,", "p.d_v_map, dV, p.scale,"),
    Planted("dQ-not-scaled", "gradient.store(rows, warp_index(), p.scale);", "gradient.store(rows, warp_index(), 1.0f);"),
    Planted("queries-of-the-first-head", "queries_full, row, next.head(work, p),", "queries_full, row, work.head_kv * p.group,", GROUPED),
    Planted(
        "dQ-of-the-first-head",
        "index += p.query_tiles - work.tiles.count();",
        "index -= work.tiles.count();",
        GROUPED,
    ),
    Planted("dQ-of-the-first-panel", "keys.base += unit * KeyTile::kPanelBytes;", "", TWO_PANELS),
    Planted("middle-of-dQ-of-the-other-queries", "dS, warpgroup * kHalf * 8, keys", "dS, (1 - warpgroup) * kHalf * 8, keys", SHARED),
    Planted("middle-of-dQ-in-the-other-half", "warp % 4, warpgroup * kHalf);", "warp % 4, (1 - warpgroup) * kHalf);", SHARED),
    Planted("middle-of-dQ-of-another-panel", "warpgroup * kHalf * 8, keys, kOwn);", "warpgroup * kHalf * 8, keys, 0);", SHARED),
    Planted("dQ-of-the-panels-of-the-first", "return warpgroup * (kUnits - kOwn);", "return 0;", SHARED_EVENLY),
    Planted("dQ-of-columns-that-are-not-there", "unit * 4 + warp >= Sums::kWarps", "false", SHARED, ""),
    Planted("dQ-of-the-first-queries", "dS.k_major(unit * 64, step)", "dS.k_major(0, step)"),
    Planted(
        "dS-in-the-columns-of-a-warpgroup",
        "store_transposed(d_s_tile, warp * 16, dS);",
        "store_transposed(d_s_tile, warp % 4 * 16, dS);",
        caught="write over what another thread wrote, with no barrier between",
    ),
    Planted("dQ-begins-with-what-was-there", "    write_zeros<kThreads, kSums>(p.d_q_sum + index * kSums);\n", ""),
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
_DS_STORED = "    store_transposed(tile, warp * 16, dS);\n    fence_proxy_async();\n"
_P_BARRIER = "        barrier_sync_unaligned(kPReady, kConsumerThreads);\n"
_DV_DONE = "        wgmma_wait_group<0>();\n        launder(dV);\n"
WIDE_OVERLAP = [
    Planted("wide-wait-before-row_lse-removed", _WAIT_BEFORE_ROWS, _LSE, WIDE),
    Planted("wide-wait-before-the-sums-of-dQ-too-late", _WAIT + _POSTPROCESS, _POSTPROCESS + _WAIT, WIDE),
]
WIDE_ORDER = [
    Planted("wide-fence-after-P-removed", _P_STORED, _P_STORED.split("        fence")[0], WIDE, _NO_FENCE),
    Planted("wide-fence-after-dS-removed", _DS_STORED, _DS_STORED.split("    fence")[0], WIDE, _NO_FENCE),
    Planted("wide-barrier-of-P-removed", _P_BARRIER, "", WIDE, _NO_BARRIER),
    Planted("wide-barrier-of-dS-removed", "        barrier_sync_unaligned(kDScoresReady, kConsumerThreads);\n", "", WIDE, _NOT_WRITTEN),
    Planted("wide-P-while-dV-is-computed", _DV_DONE, "", WIDE, _UNDER_PRODUCT),
    Planted("wide-dK-not-waited-for", "        wgmma_wait_group<0>();\n        launder(dK);\n", "", WIDE, _UNDER_PRODUCT),
]
WIDE_NUMBERS = [
    Planted("wide-dQ-of-the-first-part", "        keys.base += part * decltype(keys)::kPanelBytes;\n", "", WIDE),
    Planted("wide-dK-of-the-first-columns", "columns_from<Share::kFirst>(stages.query_tile(stage))", "stages.query_tile(stage)", WIDE),
    Planted(
        "wide-dV-of-the-first-columns",
        "columns_from<ShareV::kFirst>(stages.d_out_tile(state.stage))",
        "stages.d_out_tile(state.stage)",
        WIDE,
    ),
    Planted("wide-output-in-the-first-columns", "kFirst + j * 8, row", "j * 8, row", WIDE),
    Planted("wide-delta-not-subtracted", "low * (dP[j][h * 2] - delta[0])", "low * dP[j][h * 2]", WIDE),
]
_OTHERS_PART = "        gemm_over_keys<Element, true>(dQ, stages.operand(exchange.tile()), stages.operand(exchange.keys(kWarpgroup)));\n"
_FIRST_BLOCK = "query_tiles<kBlockQ>(work.first_key / (2 * kBlockKv) * 2 * kBlockKv, (work.first_key / (2 * kBlockKv) * 2 + 1) * kBlockKv,"
_BEYOND = "with no word from there that it has come"
PAIR_OVERLAP = [
    Planted("pair-wait-before-row_lse-removed", _WAIT_BEFORE_ROWS, _LSE, PAIR),
    Planted("pair-wait-before-the-sums-of-dQ-too-late", _WAIT + _POSTPROCESS, _POSTPROCESS + _WAIT, PAIR),
]
PAIR_ORDER = [
    Planted("pair-fence-after-P-removed", _P_STORED, _P_STORED.split("        fence")[0], PAIR, _NO_FENCE),
    Planted("pair-fence-after-dS-removed", _DS_STORED, _DS_STORED.split("    fence")[0], PAIR, _NO_FENCE),
    Planted("pair-barrier-of-P-removed", _P_BARRIER + "        launder", "        launder", PAIR, _NO_BARRIER),
    Planted("pair-P-over-the-other-dS", "                bar_sync(kPFree, kConsumerThreads);\n", "", PAIR, "write under"),
    Planted("pair-dS-over-what-is-sent", "            if constexpr (!kFirst) exchange.wait_arrived(parity ^ 1);\n", "", PAIR, _BEYOND),
    Planted("pair-sent-over-P", "                wait(ready, parity);\n", "", PAIR, "under an asynchronous copy"),
    Planted("pair-other-dS-not-waited-for", "        wait(full, parity);\n", "", PAIR, "asynchronous copy"),
    Planted("pair-keys-not-announced", "+ (i == 0 ? OtherKeys::kBytes : 0)", "", PAIR, _NO_WAIT),
    Planted("pair-arrival-left-out", "if (elected) mbarrier_arrive_relaxed_cluster(there(arrived));", "", PAIR, "1 arrivals and 0 bytes"),
    Planted(
        "pair-begins-before-the-other",
        "    barrier_cluster_sync();\n    constexpr bool kLastFirst",
        "    barrier_sync();\n    constexpr bool kLastFirst",
        PAIR,
        "of block",
    ),
    Planted("pair-ends-before-the-other", "    barrier_cluster_sync();  //", "    //", PAIR, "may still"),
    Planted("pair-descriptor-with-a-rank", "dV, stages.operand(stages.p_tile())", "dV, stages.p_tile()", PAIR, "of which block it is"),
    Planted("pair-barrier-before-output-removed", "barrier_sync_unaligned(kPReady, kConsumerThreads);  //", "//", PAIR, _UNDER_PRODUCT),
    Planted("pair-dK-not-waited-for", "        wgmma_wait_group<0>();\n        launder(dK);\n", "", PAIR, _UNDER_PRODUCT),
]
PAIR_NUMBERS = [
    Planted("pair-dQ-of-the-own-keys", _OTHERS_PART, "", PAIR),
    Planted("pair-dQ-begins-twice", "        gemm_over_keys<Element, true>(", "        gemm_over_keys<Element, false>(", PAIR),
    Planted("pair-dQ-of-the-last-tile-not-added", "        if constexpr (kLast) add_d_q();\n", "", PAIR),
    Planted("pair-dQ-added-to-the-next-tile", "pending = index, pending", "pending = next.index, pending", PAIR, "outside of the tensors"),
    Planted("pair-columns-of-the-first-block", "(rank * OtherKeys::kPanels + panel) * 64", "panel * 64", PAIR),
    Planted("pair-keys-of-the-own-block", "64, others_first_key, work", "64, work.first_key, work", PAIR),
    Planted("pair-sums-of-the-first-block", "panel(cluster_ctarank() * 2 + kWarpgroup)", "panel(kWarpgroup)", PAIR),
    Planted("pair-mask-of-the-first-block", "query_tiles<kBlockQ>(work.first_key, work.first_key + kBlockKv,", _FIRST_BLOCK, PAIR_CAUSAL),
    Planted("pair-tiles-of-the-own-block", "    work.tiles.begin = of_pair.begin, work.tiles.end = of_pair.end;\n", "", PAIR_CAUSAL, ""),
]
_READ = "        if (lane == 0) cp_async_bulk_wait_group_read<0>();\n"
_SUM_WAIT = "                ring.consumer_wait(state);\n                round_part"
_ROWS_FENCED = "            fence_proxy_async();\n            barrier_warp_sync();\n            if (elect_sync()) store_rows"
_PERSISTENT_ROWS = "        griddepcontrol_wait();\n        PipelineState<kSumStages> state;\n"
PERSISTENT_ORDER = [
    Planted("persistent-K-before-it-is-free", "            wait(stages.claims.done(), parity ^ 1);\n", "", PERSISTENT, ""),
    Planted("persistent-dV-over-dS", "        consumer.barrier();  // nobody", "        // nobody", PERSISTENT, _UNDER_PRODUCT),
    Planted("persistent-dK-over-dV", _READ + "        barrier_warp_sync();\n", "", PERSISTENT, "under"),
    Planted("persistent-dS-over-dK", "        consumer.barrier();  // dS", "        // dS", PERSISTENT, ""),
    Planted("persistent-work-tile-overwritten", "            wait(empty(), parity);\n", "", PERSISTENT, ""),
    Planted("persistent-counter-not-left-0", "p.launched_blocks - 1) st", "p.launched_blocks) st", PERSISTENT, "tile counter"),
    Planted("persistent-progress-not-cleared", "p.d_q_progress[i] = 0;", ";", PERSISTENT, ""),
    Planted("persistent-progress-before-it-is-cleared", _PERSISTENT_ROWS, "        PipelineState<kSumStages> state;\n", PERSISTENT, ""),
    Planted(
        "persistent-sums-not-waited-for", _SUM_WAIT, "                round_part", PERSISTENT, "asynchronous copy that was not waited for"
    ),
    Planted("persistent-heads-never-complete", "!= p.key_tiles) {}", "!= p.key_tiles + 1) {}", PERSISTENT, "spin that never ends"),
    Planted("persistent-sums-overwritten", "                ring.producer_acquire(state);\n", "", PERSISTENT, ""),
    Planted("persistent-rows-without-a-fence", _ROWS_FENCED, _ROWS_FENCED.split("\n", 1)[1], PERSISTENT, _NO_FENCE),
    Planted(
        "persistent-rows-overwritten",
        "            if (elect_sync()) cp_async_bulk_wait_group_read<0>();\n            b",
        "            b",
        PERSISTENT,
        "under",
    ),
]
PERSISTENT_NUMBERS = [
    Planted("persistent-sums-incomplete", "!= p.key_tiles) {}", "== p.key_tiles + 1) {}", PERSISTENT),
    Planted(
        "persistent-sums-of-the-first-head",
        "p.heads_kv + work.head_kv, 1",
        "p.heads_kv, 1",
        PERSISTENT,
        "",
    ),
    Planted("persistent-dQ-not-scaled", "round_part(p.scale,", "round_part(1.0f,", PERSISTENT),
    Planted(
        "persistent-dQ-in-the-first-columns",
        "store_rounded(QueryTile{rounded_tile}, part,",
        "store_rounded(QueryTile{rounded_tile}, 0,",
        PERSISTENT,
        _NOT_WRITTEN,
    ),
    Planted(
        "persistent-dQ-in-the-first-rows",
        "store_rounded(QueryTile{rounded_tile}, part,",
        "store_rounded(QueryTile{rounded_tile}, 0,",
        PERSISTENT_QUERIES,
        _NOT_WRITTEN,
    ),
    Planted("persistent-dQ-of-the-first-head", "head = head_and_batch - batch * p.heads_q;", "head = 0;", PERSISTENT),
    Planted(
        "persistent-walk-begins-beyond-the-last-tile",
        "work.tiles.begin : work.tiles.end - 1;",
        "work.tiles.begin : work.tiles.end;",
        PERSISTENT,
        "",
    ),
    Planted("persistent-walk-backwards-adds-forwards", "index += direction - p.group", "index += 1 - p.group", PERSISTENT, ""),
    Planted("persistent-queries-not-transposed", "tile.base + first * 8 * 128", "tile.base", PERSISTENT, _NOT_WRITTEN),
]
QUICK = 1  # of all for every run; --slow has the others


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
def control(case: BackwardCase) -> str:
    """Why the kernel without a fault is rejected: empty, as it should be."""
    return case.why_rejected(emulated_kernel(case.spec()))


def caught_by(fault: Planted) -> str:
    """What rejects the faulty kernels, empty if nothing does."""
    assert not control(fault.case), "the kernel without the fault is rejected"
    try:
        why = fault.case.why_rejected(emulated_kernel(fault.case.spec(), fault.text()))
    except EmulatorFaultError as error:
        return str(error)
    return why and f"{_RULE}: {why}"


@pytest.mark.parametrize(
    "fault",
    [
        *listed(ORDER, QUICK),
        *listed(OVERLAP, 0),
        *listed(
            [
                *NUMBERS,
                *PAIR_ORDER,
                *WIDE_ORDER,
                *PERSISTENT_ORDER,
                *WIDE_OVERLAP,
                *PAIR_OVERLAP,
                *WIDE_NUMBERS,
                *PAIR_NUMBERS,
                *PERSISTENT_NUMBERS,
            ],
            0,
        ),
    ],
)
def test_caught(fault: Planted) -> None:
    caught = caught_by(fault)
    assert caught, f"fault {fault.name} was accepted"
    assert fault.caught in caught


def test_names_are_unique() -> None:
    every = (
        *(*ORDER, *WIDE_ORDER, *PAIR_ORDER, *PERSISTENT_ORDER),
        *(*OVERLAP, *WIDE_OVERLAP, *PAIR_OVERLAP),
        *(*NUMBERS, *WIDE_NUMBERS, *PAIR_NUMBERS, *PERSISTENT_NUMBERS),
    )
    assert len({fault.name for fault in every}) == len(every)
