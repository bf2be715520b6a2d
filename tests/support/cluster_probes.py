"""Probes of the atoms of clusters: blocks arrive at each other's mbarriers and send each other tiles, which threads or products read."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from flashgen.codegen import wgmma
from tests.support.hopper_probes import bits, hopper, panels, products_agree
from tests.support.probes import Probe, Words

in_clusters = partial(hopper, cluster=2)

# All threads of both blocks arrive at the first one's mbarrier, by either kind of address, and it passes on what they wrote to memory. The
# second block may end at once: nobody uses its shared memory.
ARRIVALS = """
    const SharedAddress barrier = shared_memory();
    const int rank = cluster_ctarank();
    if (thread_index() == 0) {
        mbarrier_init(barrier, 128);
        fence_mbarrier_init();
    }
    out[0] = rank;
    out[1] = in[t];
    barrier_cluster_arrive();
    barrier_cluster_wait();
    out[2] = p.out[(t ^ 64 ^ 5) * 4 + 1];
    if (rank == 0 && t % 2) mbarrier_arrive_release_cluster(barrier);
    else mbarrier_arrive_release_cluster(mapa_shared_cluster(barrier, 0));
    u32 found = 0;
    if (rank == 0) {
        while (!mbarrier_try_wait_parity_acquire_cluster(barrier, 0)) {
        }
        found = p.out[(t ^ 64 ^ 3) * 4 + 2];
    }
    out[3] = found;
"""

ROUNDS, STAGES, TILE = 5, 2, 512  # bytes
# The first warp of each block makes tiles and sends them to the other block, whose second warp adds them up; then blocks add up
# both sums.
EXCHANGE = """
    const SharedAddress source = shared_memory(), received = source + 1024, full = received + 1024, empty = full + 16, last = empty + 16;
    const int rank = cluster_ctarank(), lane = lane_index();
    if (thread_index() == 0) {
        for (int stage = 0; stage < 2; ++stage) {
            mbarrier_init(full + stage * 8, 1);
            mbarrier_init(empty + stage * 8, 1);
        }
        mbarrier_init(last, 1);
        fence_mbarrier_init();
    }
    barrier_cluster_sync();
    if (warp_index() == 0) {
        for (u32 i = 0; i < 5; ++i) {
            const u32 stage = i % 2, parity = i / 2 & 1;
            const SharedAddress tile = source + stage * 512, place = received + stage * 512;
            while (!mbarrier_try_wait_parity_acquire_cluster(empty + stage * 8, parity ^ 1)) {
            }
            const u32* from = in + ((block_index() * 5 + i) * 32 + lane) * 4;
            store_shared_v4(tile + lane * 16, {from[0], from[1], from[2], from[3]});
            fence_proxy_async();
            barrier_warp_sync();
            const ClusterAddress full_there = mapa_shared_cluster(full + stage * 8, rank ^ 1);
            if (lane == 0) cp_async_bulk_send(mapa_shared_cluster(place, rank ^ 1), tile, 512, full_there);
        }
        for (int i = 0; i < 4; ++i) out[i] = 0;
    } else {
        uint4 sum = {0, 0, 0, 0};
        auto add = [&](const uint4& some) { sum = {sum.x + some.x, sum.y + some.y, sum.z + some.z, sum.w + some.w}; };
        for (u32 i = 0; i < 5; ++i) {
            const u32 stage = i % 2, parity = i / 2 & 1;
            if (lane == 0) mbarrier_arrive_expect_tx(full + stage * 8, 512);
            while (!mbarrier_try_wait_parity(full + stage * 8, parity)) {
            }
            add(load_shared_v4(received + stage * 512 + (lane ^ 5) * 16));
            barrier_warp_sync();
            if (lane == 0) mbarrier_arrive_release_cluster(mapa_shared_cluster(empty + stage * 8, rank ^ 1));
        }
        const SharedAddress own = last + 16, others = own + 512;
        store_shared_v4(own + lane * 16, sum);
        fence_proxy_async();
        barrier_warp_sync();
        if (lane == 0) {
            mbarrier_arrive_expect_tx(last, 512);
            cp_async_bulk_send(mapa_shared_cluster(others, rank ^ 1), own, 512, mapa_shared_cluster(last, rank ^ 1));
        }
        while (!mbarrier_try_wait_parity(last, 0)) {
        }
        add(load_shared_v4(others + (lane ^ 9) * 16));
        out[0] = sum.x; out[1] = sum.y; out[2] = sum.z; out[3] = sum.w;
    }
    barrier_cluster_sync();
"""

# Each block makes two tiles X, one after the other, sends them, and multiplies them with those of the other block: X Y^T, over one stage.
PRODUCTS = """
    const SharedAddress own = shared_memory(), others = own + 8192, full = others + 8192, empty = full + 8;
    const int rank = cluster_ctarank();
    if (thread_index() == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 1);
        fence_mbarrier_init();
    }
    barrier_cluster_sync();
    float d[8][4];
    for (u32 i = 0; i < 2; ++i) {
        while (!mbarrier_try_wait_parity(empty, i ^ 1)) {
        }
        for (int word = thread_index(); word < 2048; word += 128) store_shared(own + word * 4, in[(block_index() * 2 + i) * 2048 + word]);
        fence_proxy_async();
        barrier_sync();
        if (thread_index() == 0) {
            mbarrier_arrive_expect_tx(full, 8192);
            cp_async_bulk_send(mapa_shared_cluster(others, rank ^ 1), own, 8192, mapa_shared_cluster(full, rank ^ 1));
        }
        while (!mbarrier_try_wait_parity(full, i)) {
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            wgmma_ss<Bf16, 64>(d, matrix_descriptor(offset_in_block(own), step * 32),
                               matrix_descriptor(offset_in_block(others), step * 32), i > 0 || step > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        launder(d);
        barrier_sync();
        if (thread_index() == 0) mbarrier_arrive_relaxed_cluster(mapa_shared_cluster(empty, rank ^ 1));
    }
    barrier_cluster_sync();
    for (int i = 0; i < 32; ++i) out[i] = __float_as_uint(d[i / 4][i % 4]);
"""


def tiles() -> torch.Tensor:
    """What the blocks multiply, small whole numbers: block, round, row, column. Sums of their products are exact."""
    return torch.randint(-3, 4, (2, 2, 64, 64), generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)


def tile_words() -> Words:
    """The same, as shared memory holds them."""
    halves = tiles().view(torch.int16).numpy().view(np.uint16).reshape(4, 64, 64)
    return np.concatenate([panels(tile) for tile in halves]).view(np.uint32)


PROBES: list[Probe] = [
    in_clusters("cluster-arrivals", ARRIVALS, lambda: bits(128), 4, blocks=2),
    in_clusters("cluster-exchange", EXCHANGE, lambda: bits(4 * ROUNDS * TILE // 4), 4, blocks=4),
    in_clusters(
        *("cluster-products", PRODUCTS, tile_words, 32),
        threads=128,
        blocks=2,
        agree=products_agree,
        instructions=wgmma.wgmma_ss("Bf16", 64),
    ),
]
