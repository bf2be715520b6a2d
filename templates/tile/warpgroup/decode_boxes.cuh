// Keys in pages of a cache, as tensor copies bring them: a key tile is one box or several, each within a page. A warp of the producers
// finds where boxes are, a batch of 32 at a time and batches ahead of the thread that copies them: so an entry of the page table is there
// when its box is wanted, at the begin of a head as well.

// Where a sequence's keys are among the rows of its key tiles: [front, end). Where a sequence has several pages its tiles begin where a box
// does, which may be before its first key.
template <int kBlockKv>
struct TiledKeys {
    int front, end;

    template <class KeyTiles>
    __device__ __forceinline__ static TiledKeys of(const KeyTiles& key_tiles, const KeySpan& span) {
        const int front = key_tiles.front(span);
        return {front, front + span.length()};
    }
    // Whether the sequence begins within a tile, or a tile has rows behind its end.
    __device__ __forceinline__ bool begin_in(int tile) const { return tile * kBlockKv < front; }
    __device__ __forceinline__ bool end_in(int tile) const { return (tile + 1) * kBlockKv > end; }

    // P of rows that are not the sequence's is 0, but memory may hold infinities there, or NaN: V gets zeros. All consumers of the tile
    // call this, row group by row group, and meet at `barrier`.
    template <class ValueTile>
    __device__ __forceinline__ void clear_others(ValueTile values, int tile, int row_group, int row_groups, int barrier) const {
        if (!begin_in(tile) && !end_in(tile)) return;
        const int thread = row_group * 128 + thread_index() % 128, first = tile * kBlockKv;
        values.clear_rows(0, front - first, thread, row_groups * 128);
        values.clear_rows(max(end - first, 0), kBlockKv, thread, row_groups * 128);
        fence_proxy_async();
        bar_sync(barrier, row_groups * 128);
    }
};

// Coordinates 1 to 3 of a box's first row in the maps of k and v, which are (column, key of the page, head, page).
struct KeyBox {
    int row, head, page;
    bool exists;       // else the tile has no keys: see CachedKeyTiles
    const int* entry;  // of the page table, which says the page; null where that is known

    // Box `box` of key tile `tile` of a head, whose sequence has the keys `span`. One that has no key of the sequence is not read: it
    // lies behind its page, where the map has zeros.
    template <class Traits, class Parameters, class KeyTiles>
    __device__ __forceinline__ static KeyBox find(const Parameters& p, const KeyTiles& key_tiles, const HeadTiles& head,
                                                  const KeySpan& span, int tile, int box) {
        const CachedSequences& sequences = key_tiles.sequences;
//% if hides
        const auto keys = TiledKeys<Traits::kBlockKv>::of(key_tiles, span);
        const PackedRows rows = rows_of<Traits>(p, head);
        const int first_tile = first_seen_tile<Traits>(p, rows, span.length(), keys.front), head_kv = rows.head_kv;
        const int row = (tile - head.first - head.part_cost + first_tile) * Traits::kBlockKv + box * p.box_keys;
//% else
        const auto keys = TiledKeys<Traits::kBlockKv>::of(key_tiles, span);
        const int head_kv = rows_of<Traits>(p, head).head_kv;
        const int row = (tile - head.first - head.part_cost) * Traits::kBlockKv + box * p.box_keys;
//% endif
        if (tile < head.first + head.part_cost) return {};
        if (row >= keys.end) return {p.page_size, head_kv, 0, true};
        const PageRow at = sequences.page_row(span.begin - keys.front + row);
        if (sequences.table == nullptr) return {at.row, head_kv, sequences.page_of(head.batch), true};
        return {at.row, head_kv, 0, true, sequences.entry(head.batch, at)};
    }
    __device__ __forceinline__ void look_up(const CachedSequences& sequences) {
        if (entry != nullptr) page = sequences.page_of(*entry);
    }
};

// Has the L2 fetch lengths and the page table while the launch before ends, as far as a line of 128 bytes for each thread of the grid goes:
// a block waits for both before its first copy. That launch may still write them; all SMs write to the L2.
template <int kThreads, class Parameters>
__device__ __forceinline__ void prefetch_pages(const Parameters& p) {
    const int at = (block_index() * kThreads + thread_index()) * 32;
    if (at < p.batch) prefetch_global_l2(p.cache_seqlens + at);
    if (p.block_table == nullptr) return;
    const i64 entries = (p.batch - 1) * p.block_table_row + divide(p.len_kv, p.page_size_reciprocal);
    if (at < entries) prefetch_global_l2(p.block_table + at);
}

// A lane's box of the batch that begins with tile `first`. span_of(sequence): the span of its keys.
template <class Traits, class Parameters, class SpanOf>
__device__ __forceinline__ KeyBox box_of_lane(const Parameters& p, const Shares<Traits>& shares, const Part<Traits>& part, int first,
                                              const SpanOf& span_of) {
    const int number = divide(lane_index(), p.tile_boxes_reciprocal), box = lane_index() - number * p.tile_boxes, tile = first + number;
    if (number >= p.batch_tiles || tile >= part.end_of_share) return {};
    const HeadTiles head = tile < part.end ? part.head : shares.key_tiles.head_of(tile);
    return KeyBox::find<Traits>(p, shares.key_tiles, head, span_of(head.batch), tile, box);
}

// The boxes of a block's key tiles, found by a warp, given its first part and each lane's box of the first batch.
template <class Traits, class Parameters>
__device__ __forceinline__ void find_boxes(const Parameters& p, const DecodeStorage<Traits>& smem, const Shares<Traits>& shares,
                                           const Part<Traits>& part, KeyBox found) {
    const CachedSequences& sequences = shares.key_tiles.sequences;
    PipelineState<DecodeStorage<Traits>::kBoxBatches> state;
#pragma unroll 1
    for (int first = part.begin; first < part.end_of_share;) {
        smem.box_pipeline.producer_acquire(state);
        store_shared_v4(smem.box(state.stage, lane_index()),
                        {static_cast<u32>(found.row), static_cast<u32>(found.head), static_cast<u32>(found.page), found.exists});
        barrier_warp_sync();
        smem.box_pipeline.producer_commit(state.stage, lane_index() == 0);
        state.advance();
        first += p.batch_tiles;
        found = box_of_lane<Traits>(p, shares, part, first, [&](int batch) { return sequences.span(batch); });
        found.look_up(sequences);
    }
}

// Copies K of these boxes, or V: a thread each does, as one would be too slow for small boxes.
template <bool kValues, class Traits, class Parameters>
__device__ __forceinline__ void copy_boxes(const Parameters& p, const DecodeStorage<Traits>& smem, int tiles) {
    PipelineState<Traits::kStages> state;
    PipelineState<DecodeStorage<Traits>::kBoxBatches> batch;
    int number = 0;  // of the tile in the batch
#pragma unroll 1
    for (; tiles > 0; --tiles) {
        if (number == 0) smem.box_pipeline.consumer_wait(batch);
        const SharedAddress first = smem.box(batch.stage, number * p.tile_boxes);
        if (load_shared(first + 12) != 0) {
            smem.pipeline.producer_acquire(state);
            smem.pipeline.producer_expect(state, Traits::kKeyHeads * (kValues ? Traits::ValueTile::kBytes : Traits::KeyTile::kBytes));
            const SharedAddress full = smem.pipeline.full(state.stage);
#pragma unroll 2
            for (int box = 0; box < p.tile_boxes; ++box) {
                const uint4 v = load_shared_v4(first + box * 16);
                const int row = static_cast<int>(v.x), head = static_cast<int>(v.y), page = static_cast<int>(v.z);
#pragma unroll
                for (int i = 0; i < Traits::kKeyHeads; ++i)
                    if constexpr (kValues) smem.value_tile(state.stage, i).load_rows(box * p.box_keys, p.v_map, full, row, head + i, page);
                    else smem.key_tile(state.stage, i).load_rows(box * p.box_keys, p.k_map, full, row, head + i, page);
            }
            state.advance();
        }
        if (++number < p.batch_tiles) continue;
        smem.box_pipeline.consumer_release(batch.stage, true);
        batch.advance();
        number = 0;
    }
}
