// The producers of the decode kernel, a thread each: one keeps the stages of K and V on their way, the other one loads Q.

//% if not cached
// As PanelTile::load. The L2 gives up these bytes before those that the next launch has prefetched: see prefetch_keys. With a cache nothing
// is prefetched, and sequences may share pages.
template <class Tile>
__device__ __forceinline__ void load_evict_first(const Tile& tile, const TensorMap& map, SharedAddress barrier, int row, int head,
                                                 int batch) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel)
        cp_async_bulk_tensor_load_evict_first(tile.base + panel * Tile::kPanelBytes, map, barrier, panel * 64, row, head, batch);
}

// K and V of all key tiles of this block, from the first to the last, given its first part. Keys past the last one become zeros.
template <class Traits, class Parameters>
__device__ __forceinline__ void produce_keys(const Parameters& p, const DecodeStorage<Traits>& smem, const Shares<Traits>& shares,
                                             Part<Traits> part) {
    PipelineState<Traits::kStages> state;
#pragma unroll 1
    for (; part.exists(); part.advance(shares)) {
//% if hides
        const PackedRows rows = rows_of<Traits>(p, part.head);
        const int head = rows.head_kv, batch = part.head.batch;
        const int begin = part.first_in_head() + first_seen_tile<Traits>(p, rows, p.len_kv, 0), end = begin + part.count();
#pragma unroll 1
        for (int tile = begin; tile < end; ++tile) {
//% else
        const int head = rows_of<Traits>(p, part.head).head_kv, batch = part.head.batch, end = part.first_in_head() + part.count();
#pragma unroll 1
        for (int tile = part.first_in_head(); tile < end; ++tile) {
//% endif
            smem.pipeline.producer_acquire(state);
            smem.pipeline.producer_expect(state, DecodeStorage<Traits>::kStageBytes);
            const SharedAddress full = smem.pipeline.full(state.stage);
#pragma unroll
            for (int i = 0; i < Traits::kKeyHeads; ++i)
                load_evict_first(smem.key_tile(state.stage, i), p.k_map, full, tile * Traits::kBlockKv, head + i, batch);
#pragma unroll
            for (int i = 0; i < Traits::kKeyHeads; ++i)
                load_evict_first(smem.value_tile(state.stage, i), p.v_map, full, tile * Traits::kBlockKv, head + i, batch);
            state.advance();
        }
    }
}

// Has the L2 fetch the first tiles of K and V while the launch before ends, which leaves the memory idle. That launch may still write
// these keys: copies come after it, and find in the L2 what it wrote. All warps call this, and have a box each, or a few, as all have to
// meet at the next barrier.
template <class Traits, class Parameters>
__device__ __forceinline__ void prefetch_keys(const Parameters& p, const Part<Traits>& part) {
    constexpr int kSideBySide = Traits::kKeyHeads, kPanels = Traits::KeyTile::kPanels;
    constexpr int kBoxes = kSideBySide * (kPanels + Traits::ValueTile::kPanels);
    constexpr int kWarps = (Traits::kConsumers + 1) * 4;
    // More than an SM needs on their way; but what all SMs fetch must stay in the L2 until it is copied.
    constexpr int kPrefetchedBytes = 131072, kTiles = kPrefetchedBytes / DecodeStorage<Traits>::kStageBytes;
    const PackedRows rows = rows_of<Traits>(p, part.head);
//% if hides
    const int begin = part.first_in_head() + first_seen_tile<Traits>(p, rows, p.len_kv, 0);
//% else
    const int begin = part.first_in_head();
//% endif
    const int boxes = min(part.count(), kTiles > 0 ? kTiles : 1) * kBoxes, warp = warp_index();
    if (lane_index() != 0) return;
#pragma unroll 1
    for (int i = warp; i < boxes; i += kWarps) {
        const int row = (begin + i / kBoxes) * Traits::kBlockKv, box = i % kBoxes;
        const int head = rows.head_kv + box % kSideBySide, panel = box / kSideBySide;
        if (panel < kPanels) cp_async_bulk_prefetch_tensor(p.k_map, panel * 64, row, head, part.head.batch);
        else cp_async_bulk_prefetch_tensor(p.v_map, (panel - kPanels) * 64, row, head, part.head.batch);
    }
}

//% endif
// Q of each part. A thread of its own, because Q of the next part must wait until the consumers have done with that of this one, and the
// keys must not wait with it.
template <class Traits, class Parameters>
__device__ __forceinline__ void produce_queries(const Parameters& p, const DecodeStorage<Traits>& smem, const Shares<Traits>& shares,
                                                Part<Traits> part) {
    PipelineState<Traits::kQueryStages> state;
#pragma unroll 1
    for (; part.exists(); part.advance(shares)) {
        const PackedRows rows = rows_of<Traits>(p, part.head);
        smem.q_pipeline.producer_acquire(state);
        smem.q_pipeline.producer_expect(state, Traits::kKeyHeads * RowTiles::of(p).rows() * Traits::QueryTile::kPanels * 128);
#pragma unroll
        for (int i = 0; i < Traits::kKeyHeads; ++i) {
            const int first_head = rows.first_head + i * p.group;
            smem.q_tile(state.stage, i).load(p.q_map, smem.q_pipeline.full(state.stage), first_head, rows.first_query, rows.batch);
        }
        state.advance();
    }
}
