// The producers of the warp-specialised forward kernel where keys lie in pages of a cache: a warp that loads Q and K by tensor copies, and
// one that loads V. A key tile is one box or several, each within a page: where pages are small, copies are too many for one warp.

// Where a lane's box of a key tile begins: coordinate 1 in the maps of k and v, which are (column, key of the page, head, page), and what
// the table says of the page. Box i is lane i's. One without a key lies behind its page, where the map has zeros.
struct PageBox {
    int row, entry;

    template <int kBlockKv, class Parameters>
    __device__ __forceinline__ static PageBox find(const Parameters& p, const TiledSpan& keys, int batch, int tile) {
        const CachedSequences sequences = CachedSequences::of(p);
        const int row = tile * kBlockKv + lane_index() * p.box_keys;
        if (lane_index() >= p.tile_boxes || row >= keys.end) return {p.page_size, 0};
        const PageRow at = sequences.page_row(keys.first + row);
        return {at.row, sequences.table == nullptr ? batch : *sequences.entry(batch, at)};
    }
    // All boxes of a tile, each by its lane. One lane that copied all of them would have to wait for their coordinates again and again.
    template <class Tile, class Parameters>
    __device__ __forceinline__ void load(const Parameters& p, const Tile& tile, const TensorMap& map, SharedAddress full, int head) const {
        const int page = CachedSequences::of(p).page_of(entry);
        barrier_warp_sync();  // after lane 0 has said how many bytes there are
        if (lane_index() < p.tile_boxes) tile.load_rows(lane_index() * p.box_keys, map, full, row, head, page);
    }
};

// Loads Q and K of all work tiles of this thread block, in the order of `produce` (forward_producer.cuh). The table's entry of a box is
// read one block ahead, and a work tile is found while the last blocks of the one before are loaded: it waits in shared memory
// meanwhile, as it would take registers.
template <class Traits, class Parameters>
__device__ __forceinline__ void produce_cached_keys(const Parameters& p, const ForwardStorage<Traits>& smem) {
    using Work = WorkTileInfo<Traits>;
    constexpr int kBlockKv = Traits::kBlockKv;
    const bool elected = lane_index() == 0;
    PipelineState<Traits::kQueryStages> q_state;
    PipelineState<kWorkSlots<Traits>> slot;  // index of a work slot; its parity is unused, as Q's pipeline guards the slots
    PipelineState<Traits::kStages> state;
    auto find_work = [&](int index) {
        const Work found = Work::find(p, index);
        if (elected) found.store(smem.found_work);
        barrier_warp_sync();
    };
    auto first_box = [&] {
        const Work found = Work::load(smem.found_work);
        return PageBox::find<kBlockKv>(p, found.keys, found.batch, found.end_block - 1);
    };
    if (elected) {
        prefetch_tensormap(p.q_map);
        prefetch_tensormap(p.k_map);
    }
    int index = block_index();
    find_work(index);
    PageBox box = first_box();
#pragma unroll 1
    while (index < p.tiles) {
        const Work work = Work::load(smem.found_work);
        const int head_kv = divide(work.first_head, p.group_reciprocal);
        const int last_block = work.end_block - 1, lowest_block = work.lowest_block(p);
        int next = index;
#pragma unroll 1
        for (int k_block = last_block; k_block >= lowest_block; --k_block) {
            PageBox following{};
            if (k_block > lowest_block) following = PageBox::find<kBlockKv>(p, work.keys, work.batch, k_block - 1);
            smem.k_pipeline.producer_acquire(state);
            if (elected) smem.k_pipeline.producer_expect(state, Traits::KeyTile::kBytes);
            box.load(p, smem.key_tile(state.stage), p.k_map, smem.k_pipeline.full(state.stage), head_kv);
            state.advance();
            if (k_block == last_block) {
                if (elected) {  // it alone waits for Q's stage: others might come late, and miss the phase
                    smem.q_pipeline.producer_acquire(q_state);
                    const Work found = Work::load(smem.found_work);
                    found.store(smem.work_slot(slot.stage));  // those who wait for Q see it, by the arrival of producer_expect
                    smem.q_pipeline.producer_expect(q_state, Traits::QueryTile::kBytes);
                    const SharedAddress q_full = smem.q_pipeline.full(q_state.stage);
                    smem.query_tile(q_state.stage).load(p.q_map, q_full, found.coordinate1(), found.coordinate2(), found.batch);
                }
                slot.advance();
                q_state.advance();
            }
            // The next work tile is claimed and found with the last K block but one, where there are two, and its first box with the last.
            if (k_block == min(lowest_block + 1, last_block)) {
                next = shfl_sync_first(elected ? next_work_tile<Traits>(p, index) : 0);
                if (next < p.tiles) find_work(next);
            }
            if (k_block == lowest_block && next < p.tiles) following = first_box();
            box = following;
        }
        index = next;
    }
    // The end of the work: a slot with end_block == 0, announced by a stage of Q without a Q.
    if (!elected) return;
    smem.q_pipeline.producer_acquire(q_state);
    Work{}.store(smem.work_slot(slot.stage));
    smem.q_pipeline.producer_commit(q_state.stage, true);
}

// Loads V of the same work tiles, of which it learns as the consumers do. P of rows that are no keys is 0, but memory may hold infinities
// there, or NaN: such rows become zeros before the consumers see the tile.
template <class Traits, class Parameters>
__device__ __forceinline__ void produce_cached_values(const Parameters& p, const ForwardStorage<Traits>& smem) {
    using Work = WorkTileInfo<Traits>;
    constexpr int kBlockKv = Traits::kBlockKv;
    const bool elected = lane_index() == 0;
    PipelineState<Traits::kQueryStages> q_state;
    PipelineState<kWorkSlots<Traits>> slot;
    PipelineState<Traits::kStages> state;
    PipelineState<1> landed;
    if (elected) prefetch_tensormap(p.v_map);
#pragma unroll 1
    for (;;) {
        smem.q_pipeline.consumer_wait(q_state);
        const Work work = Work::load(smem.work_slot(slot.stage));
        if (work.end_block == 0) return;
        barrier_warp_sync();
        smem.q_pipeline.consumer_release(q_state.stage, elected);
        q_state.advance();
        slot.advance();
        const int head_kv = divide(work.first_head, p.group_reciprocal), lowest_block = work.lowest_block(p);
        PageBox box = PageBox::find<kBlockKv>(p, work.keys, work.batch, work.end_block - 1);
#pragma unroll 1
        for (int block = work.end_block - 1; block >= lowest_block; --block) {
            PageBox following{};
            if (block > lowest_block) following = PageBox::find<kBlockKv>(p, work.keys, work.batch, block - 1);
            const int front = work.keys.front - block * kBlockKv, end = work.keys.end - block * kBlockKv;
            const bool has_others = front > 0 || end < kBlockKv;
            const auto tile = smem.value_tile(state.stage);
            smem.v_pipeline.producer_acquire(state);
            const SharedAddress full = has_others ? smem.landing.full(0) : smem.v_pipeline.full(state.stage);
            if (elected) mbarrier_arrive_expect_tx(full, Traits::ValueTile::kBytes);
            box.load(p, tile, p.v_map, full, head_kv);
            if (has_others) {
                smem.landing.consumer_wait(landed);
                landed.advance();
                tile.clear_rows(0, front, lane_index(), 32);
                tile.clear_rows(end, kBlockKv, lane_index(), 32);
                fence_proxy_async();
                barrier_warp_sync();
                smem.v_pipeline.producer_commit(state.stage, elected);
            }
            state.advance();
            box = following;
        }
    }
}
