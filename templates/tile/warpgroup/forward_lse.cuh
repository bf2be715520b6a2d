// The LSE writer of the warp-specialised forward kernel. A consumer hands its row statistics over and goes on: logarithms between two work
// tiles would leave the tensor cores idle.

// One warp writes lse for the 64 rows of a consumer, in every work tile of this thread block.
template <class Traits, class Parameters>
__device__ __forceinline__ void write_lse(const Parameters& p, const ForwardStorage<Traits>& smem, int consumer) {
    constexpr int kPackGqa = Traits::kPackGqa;
    const Pipeline<1> pipeline = smem.statistics_pipeline(consumer);
    PipelineState<1> state;
    PipelineState<kWorkSlots<Traits>> slot;  // index of a work slot
#pragma unroll 1
    for (;;) {
        pipeline.consumer_wait(state);
        // The slot is visible, too: the consumer saw it, by its wait for Q, before it committed the statistics.
        const auto work = WorkTileInfo<Traits>::load(smem.work_slot(slot.stage));
        if (work.end_block == 0) return;
        slot.advance();
//% if renews
        PairStatistics statistics = PairStatistics::load(smem.statistics_of(consumer));
//% else
        const PairStatistics statistics = PairStatistics::load(smem.statistics_of(consumer));
//% endif
        barrier_warp_sync();
        pipeline.consumer_release(state.stage, lane_index() == 0);
        state.advance();
//% if packed
        const auto sequences = work.sequences(p);
//% else
        const auto sequences = Traits::sequences(p);
//% endif
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = consumer * 64 + PairStatistics::first_row_of_pair() + i * 8, query = work.first_query + row / kPackGqa;
//% if renews
            settle(statistics.rows[i].row_max, statistics.rows[i].total);  // a huge row has its own maximum, and its total negated
//% endif
//% if joins
            float lse = log_sum_exp(statistics.rows[i].origin(), fabsf(statistics.rows[i].total), p.scale_log2, p.ln2_hi, p.ln2_lo);
            const int head = work.first_head + row % kPackGqa;
            lse = lse_with_sink(lse, p.sinks[head]);
//% else
            const float lse = log_sum_exp(statistics.rows[i].origin(), fabsf(statistics.rows[i].total), p.scale_log2, p.ln2_hi, p.ln2_lo);
            const int head = work.first_head + row % kPackGqa;
//% endif
            if (query < sequences.len_q(work.batch)) p.lse[sequences.lse_offset(work.batch, head) + query] = lse;
        }
    }
}
