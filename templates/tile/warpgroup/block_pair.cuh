// Two blocks of a cluster that walk over the same queries, each with its own keys. They exchange dS of each query tile, so that each block
// computes half of the columns of dQ, over the keys of both, and adds half as much to memory.

// Which work a block of a pair does: its own key tile, and the query tiles that see any key of the pair's.
template <int kBlockQ, int kBlockKv, bool kLastFirst, class Chain, class Parameters>
__device__ __forceinline__ KeyWork find_pair_work(const Parameters& p, const Chain& chain) {
    KeyWork work = KeyWork::find<kBlockQ, 2 * kBlockKv, kLastFirst>(p, chain, block_index() / 2);
    const QueryTileRange of_pair = work.tiles;
    work.first_key += cluster_ctarank() * kBlockKv;
    work.tiles = chain.template query_tiles<kBlockQ>(work.first_key, work.first_key + kBlockKv, p.len_q);
    work.tiles.begin = of_pair.begin, work.tiles.end = of_pair.end;
    return work;
}

// What a block of a pair has of the other one. `received` is dS of the tile that both are at, [query][key]; its place is free for other
// things outside of the time from `take` to the end of the product that reads it.
template <class ScoreTile, class OtherKeys>
struct DScoresExchange {
    static constexpr int kBarriers = 3;
    SharedAddress own, received, other_keys, full, ready, arrived;

    // `own` and `received`: tiles.
    __device__ __forceinline__ DScoresExchange(SharedAddress own, SharedAddress received, SharedAddress other_keys, SharedAddress barriers)
        : own(own), received(received), other_keys(other_keys), full(barriers), ready(barriers + 8), arrived(barriers + 16) {}

    __device__ __forceinline__ ScoreTile tile() const { return {received}; }
    __device__ __forceinline__ OtherKeys keys(int panel) const { return {other_keys + panel * OtherKeys::kPanelBytes}; }

    // By one thread of each block, before the blocks meet.
    __device__ __forceinline__ void initialise() const {
        for (const SharedAddress barrier : {full, ready, arrived}) mbarrier_init(barrier, 1);
    }
    __device__ __forceinline__ static ClusterAddress there(SharedAddress address) {
        return mapa_shared_cluster(address, cluster_ctarank() ^ 1);
    }
    // By a warp of its own: sends dS of each tile, once `wait_own` returns: it is in `own`, and `received` is free. The first of what the
    // other block sends comes with its keys, those columns of them that are this block's in dQ.
    template <class Parameters, class WaitOwn>
    __device__ __forceinline__ void run(const Parameters& p, const KeyWork& work, const WaitOwn& wait_own) const {
        const int rank = cluster_ctarank();
        const int others_first_key = work.first_key + (rank == 0 ? OtherKeys::kPanelBytes / 128 : -OtherKeys::kPanelBytes / 128);
        u32 parity = 0;
        const int tiles = work.tiles.count() * p.group;
#pragma unroll 1
        for (int i = 0; i < tiles; ++i, parity ^= 1) {
            wait_own();
            if (lane_index() == 0) {
                mbarrier_arrive_expect_tx(full, ScoreTile::kBytes + (i == 0 ? OtherKeys::kBytes : 0));
                mbarrier_arrive_relaxed_cluster(there(ready));
                if (i == 0) {
#pragma unroll
                    for (int panel = 0; panel < OtherKeys::kPanels; ++panel)
                        cp_async_bulk_tensor_load(other_keys + panel * OtherKeys::kPanelBytes, p.k_map, full,
                                                  (rank * OtherKeys::kPanels + panel) * 64, others_first_key, work.head_kv, work.batch);
                }
                wait(ready, parity);
                cp_async_bulk_send(there(received), own, ScoreTile::kBytes, there(full));
            }
            barrier_warp_sync();
        }
    }
    // The consumers: wait until the other block's dS is there. One thread, `elected`, tells that block so.
    __device__ __forceinline__ void take(u32 parity, bool elected) const {
        wait(full, parity);
        if (elected) mbarrier_arrive_relaxed_cluster(there(arrived));
    }
    // Before dS is written again: waits until the other block has that of the tile before, of this parity.
    __device__ __forceinline__ void wait_arrived(u32 parity) const { wait(arrived, parity); }
};
