"""Faults of the kernel for Hopper that are planted in the emulator alone: on a GPU they would hang, or show once in a while."""

from __future__ import annotations

import pytest

from tests.emulator.test_faults import TARGET, caught_by, faulty_text, seconds
from tests.support.fault import Fault
from tests.support.faults_sm90 import FULL
from tests.support.plan import planned, to_run
from tests.support.runs import compile_ahead

_FENCE = "        fence_proxy_async();\n        barrier_warp_sync();\n"
_LAST_WAIT = "    if (lane_index() == 0) cp_async_bulk_wait_group_read<0>();\n"
_SCORES = "        wgmma_wait_group<1>();\n        value_in_use"
_OUTPUT = "        wgmma_wait_group<1>();\n        settle_output();\n        issue_output(used);\n        if (kTurns)"

# Each with what its check says.
PLANTED = [
    (
        "read under an asynchronous copy that was not waited for",
        Fault("wait-for-values-removed", "        stages.value_pipeline.wait_full(value_order);\n", "", FULL),
    ),
    (
        "read of what a tensor copy wrote, with no wait for its mbarrier",
        Fault("wait-for-keys-removed", "        stages.key_pipeline.wait_full(key_order);\n", "", FULL),
    ),
    ("missing proxy fence", Fault("fence-before-the-output-removed", _FENCE, "        barrier_warp_sync();\n", FULL)),
    ("missing proxy fence", Fault("fence-before-the-output-too-late", _FENCE, "\n".join(reversed(_FENCE.splitlines())) + "\n", FULL)),
    ("shared memory was given up under a store", Fault("last-store-not-waited-for", _LAST_WAIT, "", FULL)),
    (
        "nobody announced",
        Fault("bytes-too-few", "announce(key_order, KeyTile::kBytes)", "announce(key_order, KeyTile::kBytes - 128)", FULL),
    ),
    (
        "0 arrivals and 128 bytes",
        Fault("bytes-too-many", "(query_order, QueryTile::kBytes)", "(query_order, QueryTile::kBytes + 128)", FULL),
    ),
    ("1 arrivals and 0 bytes", Fault("values-not-released", "stages.value_pipeline.release(value_in_use, elected)", "", FULL)),
    ("all 1 have arrived already", Fault("keys-overwritten", "            stages.key_pipeline.wait_empty(key_order);\n", "", FULL)),
    ("write under a matrix product", Fault("scores-not-waited-for", _SCORES, "        value_in_use", FULL)),
    ("write under a matrix product", Fault("output-not-waited-for", _OUTPUT, _OUTPUT.replace("<1>", "<2>"), FULL)),
    (
        "registers of a of thread",
        Fault("probabilities-in-one-place", "step(probabilities[0], probabilities[1])", "step(probabilities[0], probabilities[0])", FULL),
    ),
    ("no wgmma_fence", Fault("no-wgmma-fence", "        keep_in_registers(used);\n        wgmma_fence();\n", "", FULL)),
    (
        "read of what another thread wrote, with no barrier between",
        Fault("sums-not-waited-for", "        pipeline.wait_full(order);\n", "", FULL),
    ),
    (
        "read of what another thread wrote, with no barrier between",
        Fault("sums-overwritten", "        pipeline.wait_empty(sums_order);\n", "", FULL),
    ),
    ("1 arrivals and 0 bytes", Fault("sums-not-taken", "        pipeline.release(order.stage, lane_index() == 0);\n", "", FULL)),
    (
        "read of shared memory that nobody wrote",
        Fault("queries-released-early", "if (block == 0) release_queries();", "if (block == 1) release_queries();", FULL),
    ),
    ("tile counter", Fault("tile-counter-left", "st_release_gpu(p.tile_counter, 0);", ";", FULL)),
]


QUICK = 3  # for every run; --slow has all


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    """All texts, on all cores: one after the other they would take most of the time."""
    compile_ahead(faulty_text(params["fault"]) for params in to_run(request))


@pytest.mark.parametrize(
    ("says", "fault"),
    planned(
        PLANTED,
        QUICK,
        family=lambda planted: planted[1].setting.spec(TARGET).family.name,
        kinds=lambda planted: (planted[0],),
        name=lambda planted: planted[1].name,
        seconds=lambda planted: seconds(planted[1]),
        fault=True,
    ),
)
def test_caught_by_its_check(says: str, fault: Fault) -> None:
    assert says in caught_by(fault)
