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

// d_sinks of this block's head: the sum of -P * row_delta over its rows, with P of the sink. row_delta has p.rows for each head.
template <int kThreads, class Parameters>
__device__ __forceinline__ void sum_sink_gradients(const Parameters& p) {
    if (p.d_sinks == nullptr) return;
    const int head = block_index();
    const float sink = p.sinks[head];
    float total = 0.0f, compensation = 0.0f;  // what additions to the sum rounded away (Kahan 1965)
    for (int batch = 0; batch < p.batch; ++batch) {
        const i64 first = static_cast<i64>(batch) * p.heads_q + head;
        const float *lse = p.lse + first * p.len_q, *row_delta = p.row_delta + first * p.rows;
#pragma unroll 4
        for (int row = thread_index(); row < p.len_q; row += kThreads) {
            const float of_row = lse[row];
            const float probability = of_row == -infinity() ? 0.0f : ex2_approx_ftz((sink - of_row) * 1.44269504f);
            const float term = fmaf(-probability, row_delta[row], -compensation), next = total + term;
            compensation = (next - total) - term;
            total = next;
        }
    }
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
