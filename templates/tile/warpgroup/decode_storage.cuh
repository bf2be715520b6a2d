// What the roles of the decode kernel share: a block's way through its keys, and its shared memory.

// The block's share of all key tiles. A head, to these, is a row tile of a key/value head: see PackedRows.
template <class Parameters>
__device__ __forceinline__ KeyShares<DenseKeyTiles> key_shares(const Parameters& p) {
    return {{p.key_tiles, p.heads, p.batch, p.key_tiles_reciprocal, p.heads_reciprocal, p.heads_of_share, p.heads_of_share_reciprocal},
            p.blocks, p.blocks_reciprocal};
}

template <class Parameters>
__device__ __forceinline__ PackedRows rows_of(const Parameters& p, const HeadTiles& head) {
    return PackedRows::find(RowTiles::of(p), p.group, head.batch, head.head);
}

// Shared memory: the rows of Q, stages of K and V, and what the second group of consumers hands to the first one.
template <class Traits>
struct DecodeStorage {
    using QueryTile = typename Traits::QueryTile;
    using KeyTile = typename Traits::KeyTile;
    using ValueTile = typename Traits::ValueTile;
    static constexpr int kStages = Traits::kStages, kStageBytes = KeyTile::kBytes + ValueTile::kBytes;
    // Column tiles of O that are handed over at a time: 16 bytes of each for every thread.
    static constexpr int kHandedTiles = Traits::kColumnsV / 8 < 16 ? Traits::kColumnsV / 8 : 16;
    static constexpr int kHandedBytes = Traits::kKeyGroups > 1 ? kHandedTiles * 128 * 16 : 0;
    static constexpr int kPartsBytes = Traits::kRowGroups * 2 * 16;
    static constexpr int kStatisticsBytes = Traits::kKeyGroups > 1 ? 64 * 8 : 0;

    QueryTile q_tile;
    SharedAddress stages, handed, statistics;
    Pipeline<1> q_pipeline;
    Pipeline<kStages> pipeline;
    SharedAddress parts;  // for each row group and its first and its last part: HeadParts, and whether it has written the last of them

    // All threads call this: each computes the addresses.
    __device__ __forceinline__ explicit DecodeStorage(SharedRegions& regions) {
        q_tile = {regions.take(QueryTile::kBytes)};
        stages = regions.take(kStages * kStageBytes);
        handed = regions.take(kHandedBytes);
        statistics = regions.take(kStatisticsBytes);
        q_pipeline.barriers = regions.take(Pipeline<1>::kBytes);
        pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
        parts = regions.take(kPartsBytes);
    }
    // All threads call this, too; what it does is there after the next barrier. The consumers zero the rows that Q does not have, which no
    // copy writes: the producers, for whom all wait, have nothing to do here.
    template <int kThreads>
    __device__ __forceinline__ void initialise(int q_rows) const {
        const int thread = thread_index() - 128;  // of the consumers
        if (thread < 0) return;
        if (thread == 0) {
            // Each warp releases Q: a consumer may have no tile of a part, and then nothing else keeps its warps together, of which one
            // that still waits for Q would miss its phase. One thread releases K and V, as products keep a consumer's warps together.
            q_pipeline.initialise(1, Traits::kConsumers * 4);
            pipeline.initialise(1, Traits::kRowGroups);
            fence_mbarrier_init();
        }
        for (int panel = 0; panel < QueryTile::kPanels; ++panel)
            for (int i = q_rows * 8 + thread; i < Traits::kRows * 8; i += kThreads - 128)
                store_shared_v4(q_tile.base + panel * QueryTile::kPanelBytes + i * 16, {0, 0, 0, 0});
        fence_proxy_async();
    }
    __device__ __forceinline__ KeyTile key_tile(u32 stage) const { return {stages + stage * kStageBytes}; }
    __device__ __forceinline__ ValueTile value_tile(u32 stage) const { return {stages + stage * kStageBytes + KeyTile::kBytes}; }
};
