"""Faults of the kernel for Hopper that are planted in the emulator alone: on a GPU they would hang, or show once in a while."""

from __future__ import annotations

import pytest

from tests.emulator.test_faults import caught_in_a_form, smallest
from tests.support.caught import TARGET, compile_planted, faulty_text
from tests.support.fault import Fault
from tests.support.faults_sm90 import FULL
from tests.support.plan import planned
from tests.support.runs import seconds_of

_FENCE = "        fence_proxy_async();\n        barrier_warp_sync();\n"
_LAST_WAIT = "if (lane_index() == 0) cp_async_bulk_wait_group_read<0>();"
_SCORES = "        wgmma_wait_group<1>();  // line 12: S is here\n"
_OUTPUT = "        wgmma_wait_group<1>();  // lines 14, 15"

# Each with what its check says.
PLANTED = [
    (
        "read under an asynchronous copy that was not waited for",
        Fault("wait-for-values-removed", "        smem.v_pipeline.consumer_wait(v_state);\n", "", FULL),
    ),
    (
        "read of what a tensor copy wrote, with no wait for its mbarrier",
        Fault("wait-for-keys-removed", "        smem.k_pipeline.consumer_wait(k_state);\n", "", FULL),
    ),
    ("missing proxy fence", Fault("fence-before-the-output-removed", _FENCE, "        barrier_warp_sync();\n", FULL)),
    ("missing proxy fence", Fault("fence-before-the-output-too-late", _FENCE, "\n".join(reversed(_FENCE.splitlines())) + "\n", FULL)),
    ("shared memory was given up under a store", Fault("last-store-not-waited-for", _LAST_WAIT, "", FULL)),
    (
        "nobody announced",
        Fault(
            "bytes-too-few",
            "producer_expect(k_state, Storage::KeyTile::kBytes)",
            "producer_expect(k_state, Storage::KeyTile::kBytes - 128)",
            FULL,
        ),
    ),
    (
        "0 arrivals and 128 bytes",
        Fault("bytes-too-many", "(q_state, Storage::QueryTile::kBytes)", "(q_state, Storage::QueryTile::kBytes + 128)", FULL),
    ),
    ("1 arrivals and 0 bytes", Fault("values-not-released", "smem.v_pipeline.consumer_release(v_stage_in_use, elected)", "", FULL)),
    ("all 1 have arrived already", Fault("keys-overwritten", "            smem.k_pipeline.producer_acquire(k_state);\n", "", FULL)),
    ("write under a matrix product", Fault("scores-not-waited-for", _SCORES, "", FULL)),
    ("write under a matrix product", Fault("output-not-waited-for", _OUTPUT, _OUTPUT.replace("<1>", "<2>"), FULL)),
    (
        "registers of a of thread",
        Fault("probabilities-in-one-place", "iterate(P[0], P[1])", "iterate(P[0], P[0])", FULL),
    ),
    ("no wgmma_fence", Fault("no-wgmma-fence", "        launder(P_used);\n        wgmma_fence();\n", "", FULL)),
    (
        "read of what another thread wrote, with no barrier between",
        Fault("sums-not-waited-for", "        pipeline.consumer_wait(state);\n", "", FULL),
    ),
    (
        "read of what another thread wrote, with no barrier between",
        Fault("sums-overwritten", "        pipeline.producer_acquire(statistics_state);\n", "", FULL),
    ),
    ("1 arrivals and 0 bytes", Fault("sums-not-taken", "        pipeline.consumer_release(state.stage, lane_index() == 0);\n", "", FULL)),
    (
        "read of shared memory that nobody wrote",
        Fault("queries-released-early", "if (k_block == lowest_block) release_q();", "if (k_block == lowest_block + 1) release_q();", FULL),
    ),
    ("tile counter", Fault("tile-counter-left", "st_release_gpu(p.tile_counter, 0);", ";", FULL)),
]


QUICK = 1  # for every run; --slow has all


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_planted(request)


@pytest.mark.parametrize(
    ("says", "fault"),
    planned(
        PLANTED,
        QUICK,
        family=lambda planted: planted[1].setting.spec(TARGET).family.name,
        kinds=lambda planted: (planted[0],),
        name=lambda planted: planted[1].name,
        seconds=lambda planted: seconds_of(smallest(planted[1])),
        fault=True,
    ),
)
def test_caught_by_its_check(says: str, fault: Fault) -> None:
    assert says in caught_in_a_form(fault)


def test_all_apply() -> None:
    """Those that a plain run does not compile, too: a patch must find its text."""
    for _, fault in PLANTED:
        faulty_text(fault)
