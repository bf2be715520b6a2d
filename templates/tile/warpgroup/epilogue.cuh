// From a warp's accumulator to memory: the output as tensor copies of panels of 64 columns, by way of a ring of panels in shared memory.

// Rounds out * inverse and stores the warp's 16 rows from `row` on; rows and columns outside of the tensor are left out. `ring` has kPanels
// panels of 16 rows, which no other warp uses. The copies may still read it on return; `out` is zero then.
template <class Element, int kPanels, int kOutTiles>
__device__ __forceinline__ void store_output(const TensorMap& map, float (&out)[kOutTiles][4], const float (&inverse)[2],
                                             SharedAddress ring, int row, int head, int batch) {
    // Each call begins at the ring's begin: unless the panels of the call before went round evenly, its last one may be just there.
    constexpr int kFirstPending = (kOutTiles + 7) / 8 % kPanels == 0 ? kPanels - 1 : 0;
    int lane = lane_index();
    keep_in_register(lane);  // else places in the ring, which are needed once a tile, would be kept in registers
#pragma unroll
    for (int panel = 0; panel * 8 < kOutTiles; ++panel) {
        const PanelTile<16, 64> place{ring + panel % kPanels * PanelTile<16, 64>::kBytes};
        if (panel == 0) {
            if (lane == 0) cp_async_bulk_wait_group_read<kFirstPending>();
        } else {
            if (lane == 0) cp_async_bulk_wait_group_read<kPanels - 1>();
        }
        barrier_warp_sync();
#pragma unroll
        for (int chunk = 0; chunk < 8; chunk += 2) {
            const int j = panel * 8 + chunk;
            if (j >= kOutTiles) break;
            u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float (&pair)[4] = out[j + i / 2];
                r[i] = cvt_rn_x2<Element>(pair[i % 2 * 2] * inverse[i % 2], pair[i % 2 * 2 + 1] * inverse[i % 2]);
                pair[i % 2 * 2] = pair[i % 2 * 2 + 1] = 0.0f;
            }
            stmatrix_x4(place.at(lane % 16, chunk + lane / 16), r[0], r[1], r[2], r[3]);
        }
        fence_proxy_async();
        barrier_warp_sync();
        if (lane == 0) {
            cp_async_bulk_tensor_store(map, place.base, panel * 64, row, head, batch);
            cp_async_bulk_commit_group();
        }
    }
}
