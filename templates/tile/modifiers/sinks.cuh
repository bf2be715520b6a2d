// Sinks: a score of each query head that joins the softmax of its rows once their keys are done, in their own units, with a value of 0.
// For the backward pass also their gradients.

// How far a sink is above a row's origin, in base 2; `unit`: what turns a score into the sinks' units. Bounded, so that a row without
// keys, whose origin is lower than anything, has a number, too. NaN stays.
__device__ __forceinline__ float height_of_sink(float sink, const Origin& origin, float unit, float ln2_hi, float ln2_lo) {
    const bool huge = origin.shift != 0.0f;
    const float above = huge ? fmaf(-origin.shift, unit, sink) : fmaf(-origin.row_max, ln2_lo, fmaf(-origin.row_max, ln2_hi, sink));
    return above > 1.0e3f ? 1.0e3f : above * 1.44269504f;
}

// `normaliser` of a row whose sum the sink joins.
__device__ __forceinline__ float normaliser_with_sink(float total, float height) {
    const float rise = fmaxf(height, 0.0f), factor = ex2_approx_ftz(-rise);  // of an origin that no term is above
    return factor * normaliser(fmaf(total, factor, ex2_approx_ftz(height - rise)));
}

// The log-sum-exp of a row with its sink. Without keys it is the sink.
__device__ __forceinline__ float lse_with_sink(float lse, float sink) {
    if (lse == -infinity()) return sink;
    if (sink == -infinity()) return lse;
    const float lower = ex2_approx_ftz(-fabsf(lse - sink) * 1.44269504f);  // of the two, where the higher one is 1
    return log_sum_exp(fmaxf(lse, sink), 1.0f + lower, {1.0f, 0.0f});
}

// What a thread adds to d_sinks: -P * row_delta of rows, with P of the sink.
struct SinkGradient {
    float sink, total = 0.0f, compensation = 0.0f;  // what additions to the sum rounded away (Kahan 1965)

    __device__ __forceinline__ void add(float lse, float row_delta) {
        const float probability = lse == -infinity() ? 0.0f : ex2_approx_ftz((sink - lse) * 1.44269504f);
        const float term = fmaf(-probability, row_delta, -compensation), next = total + term;
        compensation = (next - total) - term;
        total = next;
    }
};

// d_sinks of this block's head: the sum over its rows. row_delta has p.rows for each head.
template <int kThreads, class Parameters>
__device__ __forceinline__ void sum_sink_gradients(const Parameters& p) {
    if (p.d_sinks == nullptr) return;
    const int head = block_index();
    SinkGradient gradient{p.sinks[head]};
//% if packed
    const int tiles = WorkList::at(p.query_list).tiles, query_tiles = p.rows / kBlockQ;
    for (int i = warp_index(); i < tiles; i += kThreads / 32) {
        const PackedTile listed = WorkList::at(p.query_list).tile(i);
        const PackedGradientRows<kBlockQ> sequences{{listed.rows, p.tokens_q}, query_tiles};
        const float* lse = p.lse + sequences.lse_offset(listed.batch, head) + listed.first_row;
        const float* row_delta = p.row_delta + sequences.first_tile(listed.batch, head) * kBlockQ + listed.first_row;
        const int rows = min(kBlockQ, listed.rows.len_q - listed.first_row);
#pragma unroll 4
        for (int row = lane_index(); row < rows; row += 32) gradient.add(lse[row], row_delta[row]);
    }
//% else
    for (int batch = 0; batch < p.batch; ++batch) {
        const i64 first = static_cast<i64>(batch) * p.heads_q + head;
        const float *lse = p.lse + first * p.len_q, *row_delta = p.row_delta + first * p.rows;
#pragma unroll 4
        for (int row = thread_index(); row < p.len_q; row += kThreads) gradient.add(lse[row], row_delta[row]);
    }
//% endif
    float total = gradient.total;
    SharedRegions regions;
    const SharedAddress sums = regions.take(kThreads / 32 * 4);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) total += shfl_sync_bfly(total, distance);
    const int warp = warp_index();
    if (lane_index() == 0) store_shared(sums + warp * 4, __float_as_uint(total));
    barrier_sync();
    if (warp > 0) return;
    total = lane_index() < kThreads / 32 ? __uint_as_float(load_shared(sums + lane_index() * 4)) : 0.0f;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) total += shfl_sync_bfly(total, distance);
    if (lane_index() == 0) p.d_sinks[head] = total;
}
