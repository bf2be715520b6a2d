"""Clusters in the emulator: probes compute what they should, and faults planted into them are each caught, by the check for it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import ORDERS, EmulationOrder, Schedule
from tests.support.cluster_probes import PROBES, ROUNDS, tiles
from tests.support.hopper_probes import bits, fragment_place
from tests.support.probe_faults import EARLY, Planted, faulty_probes, require_caught
from tests.support.probes import compile_at_once

exchange = partial(Planted, probe="cluster-exchange")
products = partial(Planted, probe="cluster-products")
arrivals = partial(Planted, probe="cluster-arrivals")

WAIT_EMPTY = "while (!mbarrier_try_wait_parity_acquire_cluster(empty + stage * 8, parity ^ 1)) {\n            }"
WAIT_FULL = "while (!mbarrier_try_wait_parity(full + stage * 8, parity)) {\n            }"
WAIT_LAST = "while (!mbarrier_try_wait_parity(last, 0)) {\n        }\n        add(load_shared_v4(others + (lane ^ 9) * 16));"
FILL = "store_shared_v4(tile + lane * 16, {from[0], from[1], from[2], from[3]});"
FENCE = "fence_proxy_async();\n            barrier_warp_sync();"
SEND = "cp_async_bulk_send(mapa_shared_cluster(place, rank ^ 1), tile, 512, full_there);"
ARRIVE = "mbarrier_arrive_release_cluster(full_there);"
ANNOUNCE = "mbarrier_arrive_expect_tx(full + stage * 8, 512);"
RELEASE = "mbarrier_arrive_release_cluster(mapa_shared_cluster(empty + stage * 8, rank ^ 1));"
MEET_AND_RELEASE = f"barrier_warp_sync();\n            if (lane == 0) {RELEASE}"
BEGIN = "barrier_cluster_sync();\n    if (warp_index() == 0) {"
END = "sum.w;\n    }\n    barrier_cluster_sync();"
PRODUCT_WAIT = "wgmma_wait_group<0>();\n        launder(d);\n        "
PRODUCT_RELEASE = (
    "barrier_sync();\n        if (thread_index() == 0) mbarrier_arrive_relaxed_cluster(mapa_shared_cluster(empty, rank ^ 1));\n    "
)
PRODUCT_END = "barrier_cluster_sync();\n    for (int i = 0; i < 32; ++i)"


def end(instead: str) -> tuple[str, str]:
    """The end of the exchange, and another one."""
    return END, END.replace("barrier_cluster_sync();", instead)


def send(old: str, new: str) -> tuple[str, str]:
    """What sends a tile, and what does otherwise."""
    return SEND, SEND.replace(old, new)


AHEAD = EmulationOrder(Schedule.AHEAD)
SHARED, MBARRIER, BULK, CLUSTER, SPIN = "shared memory", "mbarrier", "bulk copy", "cluster", "spin that never ends"
NOBODY_WROTE, NO_PROXY_FENCE = "read of shared memory that nobody wrote", "missing proxy fence"
UNDER_SEND = "write under a copy to another block, with no word from there that it has come"
NOT_RELEASED = f"{UNDER_SEND}|write (over|under) .* of block"
ANOTHER_S = "that was not initialised: .* of block|mbarrier that another thread initialised, with no barrier between: .* of block"
ENDS = "ends the block, and block . may still"
HALF = "block 0: .*0-63 wait at barrier_cluster_wait; block 1: .*0-31 wait at barrier_cluster_wait; threads 32-63 wait at bar_sync 1$"

FAULTS = (
    exchange("full-is-not-waited-for", WAIT_FULL, "", SHARED, f"{NOBODY_WROTE}|read under an asynchronous copy"),
    exchange("full-is-not-waited-for-early", WAIT_FULL, "", SHARED, f"{NOBODY_WROTE}|no wait for its mbarrier", EARLY),
    exchange("empty-is-not-waited-for", WAIT_EMPTY, "", SHARED, NOT_RELEASED),
    exchange("release-of-the-own-stage", RELEASE, RELEASE.replace("rank ^ 1", "rank"), SHARED, NOT_RELEASED),
    exchange("release-of-the-own-address", RELEASE, "mbarrier_arrive_release_cluster(empty + stage * 8);", SHARED, NOT_RELEASED),
    exchange("release-without-order", RELEASE, RELEASE.replace("release", "relaxed"), SHARED, "another warp may still read, .* of block"),
    exchange("release-before-the-lanes-meet", MEET_AND_RELEASE, f"if (lane == 0) {RELEASE}", SHARED, "may still read, .* of block"),
    exchange("release-twice", RELEASE, f"{{ {RELEASE} {RELEASE} }}", SPIN, "0 arrivals and 512 bytes are missing"),
    exchange("arrival-too-many", SEND, f"{{ {ARRIVE} {SEND} }}", MBARRIER, "all 1 have arrived already"),
    exchange("no-release", RELEASE, ";", SPIN, "spin at mbarrier_try_wait_parity_acquire_cluster of 20.., phase parity 0: 1 arrivals"),
    exchange("acquire-of-the-block", WAIT_EMPTY, WAIT_EMPTY.replace("_acquire_cluster", ""), MBARRIER, "acquires nothing from the other"),
    exchange("no-proxy-fence", FENCE, "barrier_warp_sync();", SHARED, NO_PROXY_FENCE),
    exchange("proxy-fence-too-late", FENCE, "barrier_warp_sync();\n fence_proxy_async();", SHARED, NO_PROXY_FENCE),
    exchange("sent-before-the-lanes-meet", FENCE, "fence_proxy_async();", SHARED, f"{NOBODY_WROTE}|read of what another thread wrote"),
    exchange("one-source-for-all", "tile = source + stage * 512", "tile = source", SHARED, f"{UNDER_SEND}|read of what another thread"),
    exchange("written-while-it-is-sent", SEND, f"{{ {SEND} store_shared(tile, 0); }}", SHARED, UNDER_SEND),
    exchange("source-that-nobody-wrote", FILL, f"if (i) {FILL}", SHARED, NOBODY_WROTE),
    exchange("beyond-the-memory", *send("place, rank", "place + 65536, rank"), SHARED, "outside of the block's memory: .* of block"),
    exchange("over-an-mbarrier", *send("place, rank", "full, rank"), SHARED, "write to an mbarrier: .* of block"),
    exchange("no-mbarrier-there", *send("full_there", "full_there + 8192"), SHARED, "mbarrier that was not initialised: .* of block"),
    exchange("half-an-mbarrier", *send("full_there", "full_there + 4"), SHARED, "misaligned shared access: .* of block"),
    exchange("misaligned", *send("place, rank", "place + 8, rank"), BULK, "must be multiples of 16"),
    exchange("counted-at-the-own-mbarrier", *send("full_there", "full + stage * 8"), BULK, "counts at an mbarrier of block"),
    exchange("to-a-rank-that-is-not-there", *send("place, rank ^ 1", "place, rank + 2"), CLUSTER, "asks for rank . of its cluster"),
    exchange("mapped-twice", *send("(place,", "(full_there,"), CLUSTER, "no address in its own shared memory"),
    exchange("an-ordinary-load", SEND, f"{{ {SEND} load_shared(full_there); }}", SHARED, "outside of the block's memory"),
    exchange("too-few-bytes", ANNOUNCE, ANNOUNCE.replace("512", "256"), MBARRIER, "256 bytes that nobody announced"),
    exchange("too-few-bytes-early", ANNOUNCE, ANNOUNCE.replace("512", "256"), MBARRIER, "256 bytes that nobody announced", EARLY),
    exchange("too-many-bytes", ANNOUNCE, ANNOUNCE.replace("512", "528"), SPIN, "of 2048, phase parity 0: 0 arrivals and 16 bytes are"),
    exchange("begins-before-the-others", BEGIN, BEGIN.replace("cluster_", ""), SHARED, ANOTHER_S),
    exchange("mbarriers-unknown-to-copies", "fence_mbarrier_init();", "", SHARED, f"{NO_PROXY_FENCE}: .* of block"),
    exchange("ends-before-the-others", *end(""), CLUSTER, ENDS),
    exchange("one-ends-before-the-other", *end("if (rank) barrier_cluster_sync();"), CLUSTER, ENDS),
    exchange("arrives-and-ends", *end("barrier_cluster_arrive();"), CLUSTER, ENDS),
    exchange("ends-at-once", BEGIN, BEGIN.replace("if", "if (rank) return;\n    if"), CLUSTER, f"has ended|{ENDS}"),
    exchange("last-copy-is-not-waited-for", WAIT_LAST, "", CLUSTER, "a copy into its shared memory was not waited for", AHEAD),
    exchange("arrives-twice", *end("barrier_cluster_arrive(); barrier_cluster_sync();"), CLUSTER, "has not waited since it arrived"),
    exchange("waits-without-arrival", *end("barrier_cluster_wait();"), CLUSTER, "is at barrier_cluster_wait, and has not arrived"),
    exchange("half-a-block", *end("if (rank && warp_index() == 1) bar_sync(1, 64); else barrier_cluster_sync();"), "deadlock", HALF),
    products("product-is-not-waited-for", PRODUCT_WAIT, "launder(d);", SHARED, "write under a matrix product"),
    products(
        "release-before-the-product", f"{PRODUCT_WAIT}{PRODUCT_RELEASE}", f"{PRODUCT_RELEASE}{PRODUCT_WAIT}", SHARED, "under a matrix"
    ),
    products("sent-without-a-fence", "fence_proxy_async();", "", SHARED, NO_PROXY_FENCE),
    products("products-end-before-the-others", PRODUCT_END, PRODUCT_END.replace("barrier_cluster_sync();", ""), CLUSTER, ENDS),
    products(
        "descriptor-with-a-rank", "matrix_descriptor(offset_in_block(own)", "matrix_descriptor((own)", "wgmma", "of which block it is"
    ),
    arrivals("an-arrival-too-few", "mbarrier_init(barrier, 128);", "mbarrier_init(barrier, 129);", SPIN, "phase parity 0: 1 arrivals"),
)
FAULTY = faulty_probes(PROBES, FAULTS)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once() -> None:
    compile_at_once(faulty.of_many for faulty in FAULTY.values())


every_order = pytest.mark.parametrize(
    "order", ORDERS, ids=lambda order: f"{order.schedule.name}-{'late' if order.late_copies else 'early'}"
)


@every_order
def test_arrivals_from_another_block(order: EmulationOrder) -> None:
    out, t = FAULTY["cluster-arrivals"].run(None, order).reshape(128, 4), np.arange(128)
    assert np.array_equal(out[:, 0], t // 64), "ranks"
    assert np.array_equal(out[:, 1], bits(128))
    assert np.array_equal(out[:, 2], bits(128)[t ^ 64 ^ 5]), "what the other block wrote before the cluster's barrier"
    assert np.array_equal(out[:64, 3], out[t[:64] ^ 64 ^ 3, 2]), "and before it arrived at the first one's mbarrier"


@every_order
def test_blocks_send_each_other_tiles(order: EmulationOrder) -> None:
    exchanged = FAULTY["cluster-exchange"]
    sent = exchanged.probe.inputs().reshape(2, 2, ROUNDS, 32, 4).sum(2, dtype=np.uint32)  # cluster, rank, lane, word
    out, lanes = exchanged.run(None, order).reshape(2, 2, 2, 32, 4), np.arange(32)  # cluster, rank, warp, lane, word
    received = sent[:, ::-1, lanes ^ 5]
    assert np.array_equal(out[:, :, 1], received + received[:, ::-1, lanes ^ 9])
    assert (out[:, :, 0] == 0).all()


@every_order
def test_products_of_tiles_of_both_blocks(order: EmulationOrder) -> None:
    x, out = tiles().float(), FAULTY["cluster-products"].run(None, order).view(np.float32).reshape(2, 128, 32)
    for rank in range(2):
        expected = torch.einsum("rik,rjk->ij", x[rank], x[1 - rank]).numpy()
        assert all(out[rank, thread, i] == expected[fragment_place(thread, i)] for thread in range(128) for i in range(32))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_caught_by_its_check(fault: Planted) -> None:
    require_caught(FAULTY, fault)


@every_order
def test_caught_whatever_the_order(order: EmulationOrder) -> None:
    """What is right by chance, in the order in which a launch happens, is found as well."""
    by_chance = ["release-before-the-lanes-meet"] if order == EmulationOrder(Schedule.REVERSED) else []  # the lane that releases comes last
    for fault in FAULTS:
        if fault.name in by_chance:
            FAULTY[fault.probe].run(fault, order)
        else:
            with pytest.raises(EmulatorFaultError):
                FAULTY[fault.probe].run(fault, order)
