// What the backward pass needs of each query row and is computed once before it: row_lse, the log-sum-exp in base 2, and row_delta,
// rowsum(dO * O) - d_lse. Both are padded to whole query tiles; in the padding P and dS are 0.

constexpr int kRowLanes = 8;  // neighbouring lanes that share a row

// What a lane has of a row of O and of the same row of dO.
template <int kHeadDimV>
struct RowPart {
    static constexpr int kChunks = (kHeadDimV + kRowLanes * 8 - 1) / (kRowLanes * 8);  // of 16 bytes
    uint4 out[kChunks], d_out[kChunks];

    template <class Element>
    __device__ __forceinline__ void load(const Element* out_row, const Element* d_out_row) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int column = (i * kRowLanes + lane_index() % kRowLanes) * 8;
            const bool exists = kHeadDimV % (kRowLanes * 8) == 0 || column < kHeadDimV;
            out[i] = exists ? *reinterpret_cast<const uint4*>(out_row + column) : uint4{0, 0, 0, 0};
            d_out[i] = exists ? *reinterpret_cast<const uint4*>(d_out_row + column) : uint4{0, 0, 0, 0};
        }
    }
    // rowsum(dO * O) in fp32, in all lanes of the row.
    template <class Element>
    __device__ __forceinline__ float product() const {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const u32 pairs[2][4] = {{out[i].x, out[i].y, out[i].z, out[i].w}, {d_out[i].x, d_out[i].y, d_out[i].z, d_out[i].w}};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float x[2], y[2];
                cvt_f32_x2<Element>(x[0], x[1], pairs[0][j]);
                cvt_f32_x2<Element>(y[0], y[1], pairs[1][j]);
                dot = fmaf(x[1], y[1], fmaf(x[0], y[0], dot));
            }
        }
#pragma unroll
        for (int distance = 1; distance < kRowLanes; distance *= 2) dot += shfl_sync_bfly(dot, distance);
        return dot;
    }
};

// exp2(S * scale_log2 - row_lse) is P. A row that sees no key gets +inf, with which P is 0 without a mask.
__device__ __forceinline__ float base2_lse(float lse) { return lse == -infinity() ? infinity() : lse * 1.44269504f; }

// Writes kRows of row_lse and row_delta. The first `rows_valid` of them exist, none if it is <= 0; the rest are padding. All pointers are
// to the first row; d_lse may be null.
template <int kThreads, int kRows, int kHeadDimV, class Element>
__device__ __forceinline__ void write_row_statistics(float* row_lse, float* row_delta, const Element* out, i64 out_stride,
                                                     const Element* d_out, i64 d_out_stride, const float* lse, const float* d_lse,
                                                     int rows_valid) {
    constexpr int kRowsOfPass = kThreads / kRowLanes, kPasses = kRows / kRowsOfPass, kChunks = RowPart<kHeadDimV>::kChunks;
    constexpr int kAtOnce = kChunks > 4 ? 1 : 4 / kChunks;  // passes whose loads do not wait for one another
    static_assert(kRows % kRowsOfPass == 0, "each pass has rows for all threads");
#pragma unroll
    for (int first = 0; first < kPasses; first += kAtOnce) {
        RowPart<kHeadDimV> parts[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce && first + i < kPasses; ++i) {
            const i64 row = min((first + i) * kRowsOfPass + thread_index() / kRowLanes, rows_valid - 1);
            if (rows_valid > 0) parts[i].load(out + row * out_stride, d_out + row * d_out_stride);
            else parts[i] = {};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce && first + i < kPasses; ++i) {
            const int row = (first + i) * kRowsOfPass + thread_index() / kRowLanes;
            const bool exists = row < rows_valid;
            const float product = parts[i].template product<Element>();
            if (lane_index() % kRowLanes != 0) continue;
            row_lse[row] = exists ? base2_lse(lse[row]) : infinity();
            row_delta[row] = exists ? product - (d_lse == nullptr ? 0.0f : d_lse[row]) : 0.0f;
        }
    }
}

// Sets kCount fp32 numbers to 0.
template <int kThreads, int kCount>
__device__ __forceinline__ void write_zeros(float* first) {
    static_assert(kCount % 4 == 0, "16 bytes at a time");
#pragma unroll 8
    for (int i = thread_index() * 4; i < kCount; i += kThreads * 4) *reinterpret_cast<uint4*>(first + i) = uint4{0, 0, 0, 0};
}
