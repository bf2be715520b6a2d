// How a warp reaches its part of the sums of dQ (gradient_sum.cuh), product by product. The kernel says what it does there.

// Calls move(d, at) for each product of 16 rows x 8 columns of a warp: its accumulators, and where they lie. The warp has rows of the query
// tile at `d_q_sum`, from row tile `row_tile` on, and the columns that it owns.
template <int kRowTiles, int kTiles, int kColumns, int kGroups, class Move>
__device__ __forceinline__ void for_each_product(float (&dQ)[kRowTiles][kTiles][4], float* d_q_sum, int row_tile,
                                                 const ColumnGroup<kColumns, kGroups>& columns, const Move& move) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
            if (columns.has(j / 2)) move(dQ[i][j], d_q_sum + gradient_offset<kColumns>(row_tile + i, columns.pair(j / 2) * 2 + j % 2));
}

// Writes one product's accumulators over the sums, as `load_gradient` reads them with kVectors. No other block may add to these sums.
__device__ __forceinline__ void store_gradient(float* d_q_sum, const float (&d)[4]) {
    const uint4 four{__float_as_uint(d[0]), __float_as_uint(d[1]), __float_as_uint(d[2]), __float_as_uint(d[3])};
    *reinterpret_cast<uint4*>(d_q_sum + lane_index() * 4) = four;
}
