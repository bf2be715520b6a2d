// dQ on its way through global memory: fp32 sums, to which the blocks of all key tiles add. The sums of a query tile lie as warps hold
// them: 128 numbers for each product of 16 rows x 8 columns, products in row-major order; within one lane by lane (kVectors) or register by
// register, so that the lanes of a warp touch neighbouring words.

// Where the accumulators of one 16 x 8 product lie, from the first of the query tile.
template <int kColumns>
__device__ __forceinline__ constexpr int gradient_offset(int row_tile, int column_tile) {
    return (row_tile * (kColumns / 8) + column_tile) * 128;
}

// Adds one product's accumulators to those at `d_q_sum`.
template <bool kVectors>
__device__ __forceinline__ void add_gradient(float* d_q_sum, const float (&d)[4]) {
    if (kVectors) {
        red_add_f32_v4(d_q_sum + lane_index() * 4, d);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) red_add_f32(d_q_sum + e * 32 + lane_index(), d[e]);
    }
}

// The same for the rows of a warp, from row tile `row_tile` of the query tile on, and the columns that it owns.
template <bool kVectors, int kRowTiles, int kTiles, int kColumns, int kGroups>
__device__ __forceinline__ void add_columns(float* d_q_sum, int row_tile, const float (&product)[kRowTiles][kTiles][4],
                                            const ColumnGroup<kColumns, kGroups>& columns) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
            if (columns.has(j / 2))
                add_gradient<kVectors>(d_q_sum + gradient_offset<kColumns>(row_tile + i, columns.pair(j / 2) * 2 + j % 2), product[i][j]);
}

// Reads one product's accumulators back, times `scale`.
template <bool kVectors>
__device__ __forceinline__ void load_gradient(float (&d)[4], const float* d_q_sum, float scale) {
    if (kVectors) {
        const uint4 four = *reinterpret_cast<const uint4*>(d_q_sum + lane_index() * 4);
        const u32 bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) d[e] = __uint_as_float(bits[e]) * scale;
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) d[e] = d_q_sum[e * 32 + lane_index()] * scale;
    }
}
