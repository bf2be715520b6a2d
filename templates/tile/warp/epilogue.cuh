// From a warp's registers to memory: the output, through shared memory, and lse.

// Rounds the warp's rows and writes the valid ones to memory, by way of `tile`, which no other warp uses.
template <int kColumnsValid, class Element, int kRowTiles, int kOutTiles>
__device__ __forceinline__ void store_output(Element* rows, i64 row_stride, int rows_valid, const float (&out)[kRowTiles][kOutTiles][4],
                                             const SharedTile<kRowTiles * 16, kOutTiles * 8>& tile) {
    int lane = lane_index();
    launder(lane);
    barrier_warp_sync();  // all lanes have read what the tile held before
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int j = 0; j < kOutTiles; ++j)
                store_shared(tile.at(lane / 4, j) + tile.distance(i * 16 + h * 8, 0) + lane % 4 * 4,
                             cvt_rn_x2<Element>(out[i][j][h * 2], out[i][j][h * 2 + 1]));
    barrier_warp_sync();
    store_tile<32, kColumnsValid>(rows, row_stride, rows_valid, tile, lane);
}

// `lse` points at the warp's first row. Lane t of a row's four writes `value` for row [t / 2][t % 2], as far as there is one.
template <int kRowTiles>
__device__ __forceinline__ void store_lse(float* lse, int rows_valid, float value) {
    const int own = lane_index() % 4, row = own * 8 + lane_index() / 4;
    if (own < kRowTiles * 2 && row < rows_valid) lse[row] = value;
}
