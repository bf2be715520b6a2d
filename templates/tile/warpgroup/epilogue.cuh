// The epilogue of a consumer warp: from O in registers through a ring of panels in shared memory, 64 columns each, to global memory by
// tensor copies.

//% if packed
// Rounds O * normalisers and stores the warp's 16 rows; the copies leave out rows behind the sequence, and columns outside of the tensor.
// The coordinates are 1, 2 and 3 of the first row, see packed_sequences.cuh. `ring` has kRingPanels panels of 16 rows, which no other warp
// uses, and which the copies may still read on return. Sets O to zero.
template <class Element, int kRingPanels, int kOutTiles>
__device__ __forceinline__ void store_output(const TensorMap& map, float (&O)[kOutTiles][4], const float (&normalisers)[2],
                                             SharedAddress ring, int row, int head, int end) {
//% else
// Rounds O * normalisers and stores the warp's 16 rows; the copies leave out rows and columns outside of the tensor. The coordinates are
// those of the first row in the tensor map. `ring` has kRingPanels panels of 16 rows, which no other warp uses, and which the copies may
// still read on return. Sets O to zero.
template <class Element, int kRingPanels, int kOutTiles>
__device__ __forceinline__ void store_output(const TensorMap& map, float (&O)[kOutTiles][4], const float (&normalisers)[2],
                                             SharedAddress ring, int coordinate1, int coordinate2, int batch) {
//% endif
    // Each call begins with the ring's first panel. Where the panels of a call fill the ring a whole number of times, that panel's copy is
    // the oldest one, and all others may be pending; else the call waits for all.
    constexpr int kFirstPending = (kOutTiles + 7) / 8 % kRingPanels == 0 ? kRingPanels - 1 : 0;
    int lane = lane_index();
    launder(lane);  // else addresses in the ring, which are needed once a work tile, would occupy registers
#pragma unroll
    for (int panel = 0; panel * 8 < kOutTiles; ++panel) {
        const PanelTile<16, 64> box{ring + panel % kRingPanels * PanelTile<16, 64>::kBytes};
        if (panel == 0) {
            if (lane == 0) cp_async_bulk_wait_group_read<kFirstPending>();
        } else {
            if (lane == 0) cp_async_bulk_wait_group_read<kRingPanels - 1>();
        }
        barrier_warp_sync();
#pragma unroll
        for (int chunk = 0; chunk < 8; chunk += 2) {
            const int j = panel * 8 + chunk;
            if (j >= kOutTiles) break;
            u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float (&pair)[4] = O[j + i / 2];
                r[i] = cvt_rn_x2<Element>(pair[i % 2 * 2] * normalisers[i % 2], pair[i % 2 * 2 + 1] * normalisers[i % 2]);
                pair[i % 2 * 2] = pair[i % 2 * 2 + 1] = 0.0f;
            }
            stmatrix_x4(box.at(lane % 16, chunk + lane / 16), r[0], r[1], r[2], r[3]);
        }
        fence_proxy_async();
        barrier_warp_sync();
        if (lane == 0) {
//% if packed
            cp_async_bulk_tensor_store_5d(map, box.base, panel * 64, row, head, end, kMapRows);
//% else
            cp_async_bulk_tensor_store(map, box.base, panel * 64, coordinate1, coordinate2, batch);
//% endif
            cp_async_bulk_commit_group();
        }
    }
}
