// From a warp's accumulator of some of a gradient's columns to memory, one panel of 64 of them after the other, by tensor copies.

// Rounds gradient * scale and stores the warp's 16 rows from `row` on, columns from kFirst on (a multiple of 64). What lies outside of the
// tensor is left out. `place` is a panel of 16 rows which no other warp uses, and which is free again on return.
template <class Element, int kFirst, int kTiles>
__device__ __forceinline__ void store_columns(const TensorMap& map, const float (&gradient)[kTiles][4], float scale, SharedAddress place,
                                              int row, int head, int batch) {
    const PanelTile<16, 64> panel{place};
    int lane = lane_index();
    keep_in_register(lane);
#pragma unroll
    for (int first = 0; first < kTiles; first += 8) {
#pragma unroll
        for (int chunk = 0; chunk < 8 && first + chunk < kTiles; chunk += 2) {
            u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float (&pair)[4] = gradient[first + chunk + i / 2];
                r[i] = cvt_rn_x2<Element>(pair[i % 2 * 2] * scale, pair[i % 2 * 2 + 1] * scale);
            }
            stmatrix_x4(panel.at(lane % 16, chunk + lane / 16), r[0], r[1], r[2], r[3]);
        }
        fence_proxy_async();
        barrier_warp_sync();
        if (lane == 0) {
            cp_async_bulk_tensor_store(map, place, kFirst + first * 8, row, head, batch);
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_group_read<0>();
        }
        barrier_warp_sync();
    }
}
