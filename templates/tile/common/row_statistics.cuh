// What the backward pass needs of each query row and is computed once before it: row_lse, the log-sum-exp in base 2, and row_delta,
// rowsum(dO * O) - d_lse. Both are padded to whole query tiles; in the padding P and dS are 0.

constexpr int kRowLanes = 8;  // neighbouring lanes that share a row

// rowsum(dO * O) in fp32, in all lanes of a row.
template <int kHeadDimV, class Element>
__device__ __forceinline__ float row_product(const Element* out, const Element* d_out, bool exists) {
    float sum = 0.0f;
#pragma unroll
    for (int first = 0; first < kHeadDimV; first += kRowLanes * 8) {
        const int column = first + lane_index() % kRowLanes * 8;
        if (!exists || column >= kHeadDimV) continue;
        const uint4 a = *reinterpret_cast<const uint4*>(out + column), b = *reinterpret_cast<const uint4*>(d_out + column);
        const u32 pairs[2][4] = {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float x[2], y[2];
            cvt_f32_x2<Element>(x[0], x[1], pairs[0][i]);
            cvt_f32_x2<Element>(y[0], y[1], pairs[1][i]);
            sum = fmaf(x[1], y[1], fmaf(x[0], y[0], sum));
        }
    }
#pragma unroll
    for (int distance = 1; distance < kRowLanes; distance *= 2) sum += shfl_sync_bfly(sum, distance);
    return sum;
}

// exp2(S * scale_log2 - row_lse) is P. A row that sees no key gets +inf, with which P is 0 without a mask.
__device__ __forceinline__ float base2_lse(float lse) { return lse == -infinity() ? infinity() : lse * 1.44269504f; }

// Writes kRows of row_lse and row_delta, of which `rows_valid` exist. All pointers but d_lse, which may be null, are to the first of them.
template <int kThreads, int kRows, int kHeadDimV, class Element>
__device__ __forceinline__ void write_row_statistics(float* row_lse, float* row_delta, const Element* out, i64 out_stride,
                                                     const Element* d_out, i64 d_out_stride, const float* lse, const float* d_lse,
                                                     int rows_valid) {
    static_assert(kRows % (kThreads / kRowLanes) == 0, "each pass has rows for all threads");
#pragma unroll
    for (int first = 0; first < kRows; first += kThreads / kRowLanes) {
        const int row = first + thread_index() / kRowLanes;
        const bool exists = row < rows_valid;
        const float sum = row_product<kHeadDimV>(out + row * out_stride, d_out + row * d_out_stride, exists);
        if (lane_index() % kRowLanes != 0) continue;
        row_lse[row] = exists ? base2_lse(lse[row]) : infinity();
        row_delta[row] = exists ? sum - (d_lse == nullptr ? 0.0f : d_lse[row]) : 0.0f;
    }
}

// Sets kCount fp32 numbers to 0.
template <int kThreads, int kCount>
__device__ __forceinline__ void write_zeros(float* first) {
    static_assert(kCount % 4 == 0, "16 bytes at a time");
#pragma unroll 8
    for (int i = thread_index() * 4; i < kCount; i += kThreads * 4) *reinterpret_cast<uint4*>(first + i) = uint4{0, 0, 0, 0};
}
