// From a warp's accumulator to memory: the output tile through shared memory, the log-sum-exp directly.

// Rounds the warp's rows into the tile, which starts at `first_row`.
template <class Element, int kRowTiles, int kOutTiles, int kRows, int kColumns>
__device__ __forceinline__ void stage_output(const SharedTile<kRows, kColumns>& tile, int first_row,
                                             const float (&out)[kRowTiles][kOutTiles][4]) {
    const int lane = lane_index();
    const auto place = tile.place(first_row + lane / 4, 0);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int j = 0; j < kOutTiles; ++j)
                store_shared(place.at(i * 16 + h * 8, j) + lane % 4 * 4,
                             cvt_rn_x2<Element>(out[i][j][h * 2], out[i][j][h * 2 + 1]));
}

// `lse` points at the tile's first row; one of the four lanes of a row writes.
template <int kRowTiles>
__device__ __forceinline__ void store_lse(float* lse, int first_row, int rows_valid, const float (&values)[kRowTiles][2]) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + i * 16 + h * 8 + lane / 4;
            if (lane % 4 == 0 && row < rows_valid) lse[row] = values[i][h];
        }
}
