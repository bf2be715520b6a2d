// Q as fp16 numbers whatever its elements are: each row times a power of two that brings its largest magnitude to where fp16 is most exact.
// Scores are then too large by that power, or too small.

// 2^n and 2^-n for the largest n that keeps a row with this maximum of magnitudes below fp16's largest number. n is at most 126, as 2^-n
// is to be normal. A maximum that is not finite gives other powers than a finite one, but finite ones.
struct RowPower {
    float up, down;

    __device__ __forceinline__ static RowPower of(float maximum) {
        const int exponent = static_cast<int>(__float_as_uint(maximum) >> 23) - 127, n = min(15 - exponent, 126);
        return {__int_as_float((127 + n) << 23), __int_as_float((127 - n) << 23)};
    }
};

// Copies Q to shared memory in the order of columns that gemm_scores_e4m3 wants; it is 0 where there is no row or column. Writes to
// `row_factors`, kRows numbers, what scores of a row are to be multiplied by, `factor` among it. All threads of the block take part.
template <int kThreads, int kColumnsValid, class Rows, class Element, int kRows, int kColumns, class Sequences>
__device__ __forceinline__ void load_scaled_queries(const Rows& rows, const SharedTile<kRows, kColumns>& tile, SharedAddress row_factors,
                                                    const Element* q, const Strides& strides, const Sequences& sequences, float factor) {
    constexpr int kGroups = kColumns / 16, kLanes = kGroups > 8 ? 16 : kGroups > 4 ? 8 : kGroups > 2 ? 4 : 2;
    static_assert(kColumnsValid % 16 == 0 && kRows * kLanes % 32 == 0, "a lane has 16 columns or none, and all lanes of a warp take part");
    for (int n = thread_index(); n < kRows * kLanes; n += kThreads) {
        const int row = n / kLanes, group = n % kLanes;
        uint4 loaded[2] = {};
        if (row < rows.rows && group * 16 < kColumnsValid) {
            const PackedRow from = rows.at(row);
            const Element* columns = sequences.query_row(q, strides, rows.batch, from.head, from.query) + group * 16;
            loaded[0] = *reinterpret_cast<const uint4*>(columns);
            loaded[1] = *reinterpret_cast<const uint4*>(columns + 8);
        }
        const u32 pairs[8] = {loaded[0].x, loaded[0].y, loaded[0].z, loaded[0].w, loaded[1].x, loaded[1].y, loaded[1].z, loaded[1].w};
        float values[16], maximum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            cvt_f32_x2<Element>(values[i * 2], values[i * 2 + 1], pairs[i]);
            maximum = fmaxf(maximum, fmaxf(fabsf(values[i * 2]), fabsf(values[i * 2 + 1])));
        }
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) maximum = fmaxf(maximum, shfl_sync_bfly(maximum, distance));
        const RowPower power = RowPower::of(maximum);
        u32 scaled[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) scaled[i] = cvt_rn_x2<Fp16>(values[i * 2] * power.up, values[i * 2 + 1] * power.up);
        if (group < kGroups) {
            // Columns 0, 1, 4, 5, .. come first, then 2, 3, 6, 7, ..
            store_shared_v4(tile.at(row, group * 2), {scaled[0], scaled[2], scaled[4], scaled[6]});
            store_shared_v4(tile.at(row, group * 2 + 1), {scaled[1], scaled[3], scaled[5], scaled[7]});
        }
        if (group == 0) store_shared(row_factors + row * 4, __float_as_uint(power.down * factor));
    }
}

// What the scores of a lane's rows are multiplied by.
template <int kRowTiles>
struct ScoreFactors {
    float of_row[kRowTiles][2];

    // `first_row`: the warp's, among those that `row_factors` has numbers for.
    __device__ __forceinline__ ScoreFactors(SharedAddress row_factors, int first_row) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                of_row[i][h] = __uint_as_float(load_shared(row_factors + (first_row + i * 16 + h * 8 + lane_index() / 4) * 4));
    }
    template <int kKeyTiles>
    __device__ __forceinline__ void multiply(float (&S)[kRowTiles][kKeyTiles][4]) const {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) S[i][j][e] *= of_row[i][e / 2];
    }
};

// The number of a key/value head among those of [batch, head], or 1 where there are none.
__device__ __forceinline__ float descale_of(const float* descales, i64 batch_stride, i64 head_stride, int batch, int head) {
    return descales == nullptr ? 1.0f : descales[batch * batch_stride + head * head_stride];
}
