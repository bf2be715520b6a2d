"""Faults planted into probes of the atoms that sm_90a brings: each is caught in the emulator, by the check for it."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import ORDERS, EmulationOrder
from tests.support.hopper_probes import PROBES
from tests.support.probe_faults import EARLY, LATE, Planted, faulty_probes, require_caught
from tests.support.probes import compile_at_once

BY_NAME = {probe.name: probe for probe in PROBES}

WAIT_FULL = "while (!mbarrier_try_wait_parity(full, i & 1)) {\n            }"
WAIT_EMPTY = "while (!mbarrier_try_wait_parity(empty, i & 1 ^ 1)) {\n            }"
RELEASE = "if (t == 128) mbarrier_arrive(empty);"
WAIT_STORE = "if (lane == 0) cp_async_bulk_wait_group_read<0>();\n            barrier_warp_sync();"
LAST_WAIT = "}\n        if (lane == 0) cp_async_bulk_wait_group_read<0>();"
FENCE = "fence_proxy_async();\n            barrier_warp_sync();"
ANNOUNCE = "mbarrier_arrive_expect_tx(full, 8192);"
PRODUCT = "matrix_descriptor(tile, step * 32), step > 0);"
LOAD = "cp_async_bulk_tensor_load(tile,"


SHARED, MBARRIER, WGMMA, TENSOR_COPY, SPIN = "shared memory", "mbarrier", "wgmma", "tensor copy", "spin that never ends"
NO_WAIT = "read under an asynchronous copy that was not waited for"
NOT_ITS_WAIT = "read of what a tensor copy wrote, with no wait for its mbarrier"
UNDER_PRODUCT = "write under a matrix product that was not waited for"
UNDER_STORE = "write under a store that has not read it"
NO_PROXY_FENCE = "missing proxy fence"

FAULTS = (
    Planted("no-proxy-fence", "fence_proxy_async();", "", SHARED, NO_PROXY_FENCE),
    Planted("proxy-fence-too-late", FENCE, "barrier_warp_sync();\n            fence_proxy_async();", SHARED, NO_PROXY_FENCE),
    Planted("proxy-fence-of-one-lane", "fence_proxy_async();", "if (lane == 0) fence_proxy_async();", SHARED, NO_PROXY_FENCE),
    Planted("operand-with-no-proxy-fence", "fence_proxy_async();", "", SHARED, NO_PROXY_FENCE, probe="wgmma_ss-Bf16-8"),
    Planted("mbarrier-with-no-fence", "fence_mbarrier_init();", "", SHARED, NO_PROXY_FENCE),
    Planted("mbarrier-with-no-barrier", "barrier_sync();", "", SHARED, "mbarrier that another thread initialised, with no barrier between"),
    Planted("no-mbarrier", "mbarrier_init(empty, 1);", "", SHARED, "use of an mbarrier that was not initialised"),
    Planted("mbarrier-initialised-twice", "mbarrier_init(empty, 1);", "mbarrier_init(full, 1);", SHARED, "write to an mbarrier"),
    Planted("mbarrier-overwritten", RELEASE, "store_shared(empty, 0);", SHARED, "write to an mbarrier"),
    Planted("mbarrier-read", RELEASE, "load_shared(empty);", SHARED, "read of an mbarrier"),
    Planted("half-an-mbarrier", RELEASE, "mbarrier_arrive(empty + 4);", SHARED, "misaligned"),
    Planted("mbarrier-of-none", "mbarrier_init(empty, 1);", "mbarrier_init(empty, 0);", MBARRIER, "for no arrivals"),
    Planted("full-is-not-waited-for", WAIT_FULL, "", SHARED, NO_WAIT),
    Planted("full-is-not-waited-for-early", WAIT_FULL, "", SHARED, NOT_ITS_WAIT, EARLY),
    Planted("wrong-parity", "(full, i & 1)", "(full, i & 1 ^ 1)", SHARED, NO_WAIT),
    Planted("wrong-parity-early", "(full, i & 1)", "(full, i & 1 ^ 1)", SPIN, "of 16384, phase parity 1: 1 arrivals", EARLY),
    Planted("parity-of-two", "(full, i & 1)", "(full, 2)", MBARRIER, "for parity 2"),
    Planted("one-of-two-barriers", "(barriers + i * 8, 0)", "(barriers + 8, 0)", SHARED, NOT_ITS_WAIT, EARLY, "two-mbarriers"),
    Planted("too-few-bytes", ANNOUNCE, "mbarrier_arrive_expect_tx(full, 4096);", MBARRIER, "4096 bytes that nobody announced"),
    Planted("too-few-bytes-early", ANNOUNCE, "mbarrier_arrive_expect_tx(full, 4096);", MBARRIER, "4096 bytes that nobody announced", EARLY),
    Planted(
        "too-many-bytes", ANNOUNCE, "mbarrier_arrive_expect_tx(full, 8448);", SPIN, "phase parity 0: 0 arrivals and 256 bytes are missing"
    ),
    Planted("no-arrival", RELEASE, "", SPIN, "phase parity 0: 1 arrivals and 0 bytes are missing"),
    Planted("arrival-too-many", ANNOUNCE, ANNOUNCE + " mbarrier_arrive(full);", MBARRIER, "all 1 have arrived already"),
    Planted("empty-is-not-waited-for", WAIT_EMPTY, "", SHARED, "write (over|under)", EARLY),
    Planted("release-before-the-wait", "wgmma_wait_group<0>();", RELEASE + " wgmma_wait_group<0>();", SHARED, UNDER_PRODUCT),
    Planted("store-is-not-waited-for", WAIT_STORE, "barrier_warp_sync();", SHARED, UNDER_STORE),
    Planted(
        "store-is-waited-for-by-its-lane", WAIT_STORE, "if (lane == 0) cp_async_bulk_wait_group_read<0>();", SHARED, "write (over|under)"
    ),
    Planted("last-store-is-not-waited-for", LAST_WAIT, "}", TENSOR_COPY, "shared memory was given up under a store"),
    Planted("store-without-a-group", "cp_async_bulk_commit_group();", "", SHARED, UNDER_STORE),
    Planted("store-before-the-lanes-meet", FENCE, "fence_proxy_async();", SHARED, "read of what another thread wrote"),
    Planted("misaligned-box", LOAD, LOAD.replace("tile", "tile + 512"), TENSOR_COPY, "no multiple of 1024"),
    Planted("product-is-not-waited-for", "wgmma_wait_group<0>();", "", SHARED, UNDER_PRODUCT),
    Planted("accumulator-written", "wgmma_wait_group<0>();", "d[3][1] = 0; wgmma_wait_group<0>();", WGMMA, "the accumulator of thread"),
    Planted("accumulator-read", "wgmma_wait_group<0>();", "d[3][1] += 1; wgmma_wait_group<0>();", WGMMA, "the accumulator of thread"),
    Planted(
        "a-written", "wgmma_wait_group<1>();", "a[1][2] ^= 1; wgmma_wait_group<1>();", WGMMA, "registers of a", probe="wgmma_rs-Fp16-8"
    ),
    Planted("no-wgmma-fence", "wgmma_fence();", "", WGMMA, "no wgmma_fence"),
    Planted("products-that-never-end", "wgmma_wait_group<0>();", "", WGMMA, "while matrix products are under way", probe="wgmma_ss-Bf16-8"),
    Planted("operands-of-each-thread", PRODUCT, PRODUCT.replace("step > 0", "t > 130"), "divergence", "not the same in all threads"),
    Planted("descriptor-of-no-swizzle", PRODUCT, PRODUCT.replace("step * 32)", "step * 32) & ~0ull >> 2"), WGMMA, "takes the descriptor"),
    Planted(
        "setmaxnreg-of-a-warp",
        "setmaxnreg_inc<240>();",
        "if (t < 160) setmaxnreg_inc<240>();",
        "divergence",
        "another thread of its warpgroup",
    ),
    Planted("barrier-0", "bar_arrive(1, 128);", "bar_arrive(0, 128);", "named barrier", "numbers go from 1 to 15", probe="named-barrier"),
    Planted("half-a-warp", "bar_arrive(1, 128);", "bar_arrive(1, 80);", "named barrier", "whole warps take part", probe="named-barrier"),
    Planted("other-count", "bar_arrive(1, 128);", "bar_arrive(1, 96);", "divergence", "says that barrier 1 has", probe="named-barrier"),
    Planted("warp-index-of-some-lanes", "warp_index() < 2", "t % 2 && warp_index() < 2", "deadlock", "warp_index", probe="named-barrier"),
    Planted("stored-before-the-tensor", "24, 2, 0, 1", "24, -2, 0, 1", TENSOR_COPY, "before the tensor's begin", probe="tensor-store"),
    Planted("no-named-barrier", "bar_sync(1, 128);", "", SHARED, "read of (shared memory|what)", probe="named-barrier"),
)


FAULTY = faulty_probes(PROBES, FAULTS)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once() -> None:
    compile_at_once([BY_NAME["pipeline"], *(faulty.of_many for faulty in FAULTY.values())])


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{order.schedule.name}-{'late' if order.late_copies else 'early'}")
def test_nothing_is_found_without_a_fault(order: EmulationOrder) -> None:
    for probe in FAULTY.values():
        probe.run(None, order)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_caught_by_its_check(fault: Planted) -> None:
    require_caught(FAULTY, fault)


def test_a_spin_names_its_mbarrier() -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == "too-many-bytes")
    with pytest.raises(
        EmulatorFaultError, match=r"threads 128-255 spin at mbarrier_try_wait_parity of 16384, phase parity 0: 0 arrivals and 256"
    ):
        FAULTY[fault.probe].run(fault, LATE)


def test_copies_outside_of_the_tensors() -> None:
    with pytest.raises(EmulatorFaultError, match="copies 128 bytes from outside of the tensors"):
        BY_NAME["pipeline"].on_cpu(LATE, readable=2 * 8192 - 2)


def test_a_map_of_another_kind() -> None:
    probe = BY_NAME["pipeline"]
    narrow = dataclasses.replace(probe.maps[0], box=(32, 64, 1, 1), swizzle_bytes=64)
    with pytest.raises(EmulatorFaultError, match="rows of 32 elements and a swizzle of 64 bytes"):
        dataclasses.replace(probe, maps=(narrow, probe.maps[1])).on_cpu(LATE)
