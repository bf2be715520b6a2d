// From a warp's accumulators to S in global memory, in fp32 as they are: neither scaled nor masked.

// Writes rows [0, rows_valid) and columns [0, columns_valid) of the warp's S, 16 bytes a lane; the last 16 may reach beyond
// columns_valid. Four lanes hold a row, a pair of columns of each column tile. Two neighbours trade pairs, so that the even one has four
// columns of one column tile, and the odd one four of the next: the four lanes then write 64 bytes in a row, which are two whole sectors.
template <int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void store_scores(float* rows, i64 row_stride, int rows_valid, int columns_valid,
                                             const float (&S)[kRowTiles][kKeyTiles][4]) {
    static_assert(kKeyTiles % 2 == 0, "column tiles are written in pairs");
    const int lane = lane_index(), odd = lane % 2;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = i * 16 + h * 8 + lane / 4;
            float* row_start = rows + row * row_stride;
#pragma unroll
            for (int j = 0; j < kKeyTiles; j += 2) {
                const float(&even_tile)[4] = S[i][j], (&odd_tile)[4] = S[i][j + 1];
                u32 kept[2], got[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    kept[e] = __float_as_uint(odd ? odd_tile[h * 2 + e] : even_tile[h * 2 + e]);
                    got[e] = shfl_sync_bfly(__float_as_uint(odd ? even_tile[h * 2 + e] : odd_tile[h * 2 + e]), 1);
                }
                const int column = (j + odd) * 8 + lane % 4 / 2 * 4;
                const uint4 four = odd ? uint4{got[0], got[1], kept[0], kept[1]} : uint4{kept[0], kept[1], got[0], got[1]};
                if (row < rows_valid && column < columns_valid) *reinterpret_cast<uint4*>(row_start + column) = four;
            }
        }
}
