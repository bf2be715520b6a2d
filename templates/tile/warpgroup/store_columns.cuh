// From a warp's accumulator of some of a gradient's columns to memory, by way of a tile in shared memory with a row for each key, which
// nobody reads at that time: the place of K or V, or that of dS where the next K and V are already on their way there.

// Rounds gradient * scale and stores the warp's 16 rows: those from `tile_row` on of the tile, from `row` on of the head. They are of
// columns from kFirst on (a multiple of 64). What lies outside of the tensor is left out. The copies may still read the tile on return.
//% if packed
// `row` and `end` are coordinates 1 and 3 of a packed tensor: what lies outside of the sequence is left out, too.
template <class Element, int kFirst, int kTiles, class Tile>
__device__ __forceinline__ void store_columns(const TensorMap& map, const float (&gradient)[kTiles][4], float scale, const Tile& tile,
                                              int tile_row, int row, int head, int end) {
//% else
template <class Element, int kFirst, int kTiles, class Tile>
__device__ __forceinline__ void store_columns(const TensorMap& map, const float (&gradient)[kTiles][4], float scale, const Tile& tile,
                                              int tile_row, int row, int head, int batch) {
//% endif
    const SharedAddress rows = tile.base + kFirst / 64 * Tile::kPanelBytes + tile_row * 128;
    int lane = lane_index();
    launder(lane);  // else places, which are needed once, would be kept in registers
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float (&pair)[4] = gradient[j + i / 2];
            r[i] = cvt_rn_x2<Element>(pair[i % 2 * 2] * scale, pair[i % 2 * 2 + 1] * scale);
        }
        const PanelTile<16, 64> panel{rows + j / 8 * Tile::kPanelBytes};
        stmatrix_x4(panel.at(lane % 16, j % 8 + lane / 16), r[0], r[1], r[2], r[3]);
    }
    fence_proxy_async();
    barrier_warp_sync();
    if (lane > 0) return;
#pragma unroll
    for (int j = 0; j < kTiles; j += 8)
//% if packed
        cp_async_bulk_tensor_store_5d(map, rows + j / 8 * Tile::kPanelBytes, kFirst + j * 8, row, head, end, kMapRows);
//% else
        cp_async_bulk_tensor_store(map, rows + j / 8 * Tile::kPanelBytes, kFirst + j * 8, row, head, batch);
//% endif
    cp_async_bulk_commit_group();
}
