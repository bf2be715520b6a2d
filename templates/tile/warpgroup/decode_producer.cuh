// The producers of the decode kernel, a thread each: one keeps the stages of K and V on their way, the other one loads Q.

//% if not cached
// K and V of all key tiles of this block, from the first to the last, given its first part. Keys past the last one become zeros.
template <class Traits, class Parameters>
__device__ __forceinline__ void produce_keys(const Parameters& p, const DecodeStorage<Traits>& smem, const Shares<Traits>& shares,
                                             Part<Traits> part) {
    PipelineState<Traits::kStages> state;
#pragma unroll 1
    for (; part.exists(); part.advance(shares)) {
//% if hides
        const PackedRows rows = rows_of(p, part.head);
        const int head = rows.head_kv, batch = part.head.batch;
        const int begin = part.first_in_head() + first_seen_tile<Traits>(p, rows, p.len_kv, 0), end = begin + part.count();
#pragma unroll 1
        for (int tile = begin; tile < end; ++tile) {
//% else
        const int head = rows_of(p, part.head).head_kv, batch = part.head.batch, end = part.first_in_head() + part.count();
#pragma unroll 1
        for (int tile = part.first_in_head(); tile < end; ++tile) {
//% endif
            smem.pipeline.producer_acquire(state);
            smem.pipeline.producer_expect(state, DecodeStorage<Traits>::kStageBytes);
            const SharedAddress full = smem.pipeline.full(state.stage);
            smem.key_tile(state.stage).load(p.k_map, full, tile * Traits::kBlockKv, head, batch);
            smem.value_tile(state.stage).load(p.v_map, full, tile * Traits::kBlockKv, head, batch);
            state.advance();
        }
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
        const PackedRows rows = rows_of(p, part.head);
        smem.q_pipeline.producer_acquire(state);
        smem.q_pipeline.producer_expect(state, RowTiles::of(p).rows() * Traits::QueryTile::kPanels * 128);
        smem.q_tile(state.stage).load(p.q_map, smem.q_pipeline.full(state.stage), rows.first_head, rows.first_query, rows.batch);
        state.advance();
    }
}
