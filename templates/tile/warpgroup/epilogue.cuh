// The epilogue of a consumer warp: from O in registers through a ring of panels in shared memory, 64 columns each, to global memory by
// tensor copies.

using OutPanel = PanelTile<16, 64>;  // 16 rows, those of a warp

//% if overwrites
// Rounds O * normalisers of a panel's columns into shared memory.
//% else
// Rounds O * normalisers of a panel's columns into shared memory, and sets them to zero.
//% endif
template <class Element, int kOutTiles>
__device__ __forceinline__ void round_panel(float (&O)[kOutTiles][4], const float (&normalisers)[2], int panel, OutPanel to, int lane) {
#pragma unroll
    for (int chunk = 0; chunk < 8; chunk += 2) {
        const int j = panel * 8 + chunk;
        if (j >= kOutTiles) break;
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float (&pair)[4] = O[j + i / 2];
            r[i] = cvt_rn_x2<Element>(pair[i % 2 * 2] * normalisers[i % 2], pair[i % 2 * 2 + 1] * normalisers[i % 2]);
//% if not overwrites
            pair[i % 2 * 2] = pair[i % 2 * 2 + 1] = 0.0f;
//% endif
        }
        stmatrix_x4(to.at(lane % 16, chunk + lane / 16), r[0], r[1], r[2], r[3]);
    }
}

//% if packed
// One lane begins a panel's copy. The coordinates are 1, 2 and 3 of the first row, see packed_sequences.cuh.
__device__ __forceinline__ void copy_panel(const TensorMap& map, OutPanel from, int panel, int row, int head, int end) {
    cp_async_bulk_tensor_store_5d(map, from.base, panel * 64, row, head, end, kMapRows);
    cp_async_bulk_commit_group();
}
//% else
// One lane begins a panel's copy. The coordinates are those of the first row in the tensor map.
__device__ __forceinline__ void copy_panel(const TensorMap& map, OutPanel from, int panel, int coordinate1, int coordinate2, int batch) {
    cp_async_bulk_tensor_store(map, from.base, panel * 64, coordinate1, coordinate2, batch);
    cp_async_bulk_commit_group();
}
//% endif

// Rounds O * normalisers and stores the warp's 16 rows; the copies leave out rows behind the sequence, and columns outside of the tensor.
//% if overwrites
// `ring` has kRingPanels panels, which no other warp uses, and which the copies may still read on return. kOneFence: if the ring has all
// panels, one fence is for all of them, and the first copy waits for the last panel.
//% else
// `ring` has kRingPanels panels, which no other warp uses, and which the copies may still read on return. Sets O to zero. kOneFence: if the
// ring has all panels, one fence is for all of them, and the first copy waits for the last panel.
//% endif
template <class Element, int kRingPanels, bool kOneFence, int kOutTiles, class... Coordinates>
__device__ __forceinline__ void store_output(const TensorMap& map, float (&O)[kOutTiles][4], const float (&normalisers)[2],
                                             SharedAddress ring, Coordinates... coordinates) {
    constexpr int kPanels = (kOutTiles + 7) / 8;
    int lane = lane_index();
    launder(lane);  // else addresses in the ring, which are needed once a work tile, would occupy registers
    if constexpr (kOneFence && kPanels == kRingPanels) {
        if (lane == 0) cp_async_bulk_wait_group_read<0>();
        barrier_warp_sync();
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            round_panel<Element>(O, normalisers, panel, {ring + panel * OutPanel::kBytes}, lane);
        fence_proxy_async();
        barrier_warp_sync();
        if (lane != 0) return;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) copy_panel(map, {ring + panel * OutPanel::kBytes}, panel, coordinates...);
    } else {
        // Each call begins with the ring's first panel. Where the panels of a call fill the ring a whole number of times, that panel's copy
        // is the oldest one, and all others may be pending; else the call waits for all.
        constexpr int kFirstPending = kPanels % kRingPanels == 0 ? kRingPanels - 1 : 0;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            const OutPanel box{ring + panel % kRingPanels * OutPanel::kBytes};
            if (panel == 0) {
                if (lane == 0) cp_async_bulk_wait_group_read<kFirstPending>();
            } else {
                if (lane == 0) cp_async_bulk_wait_group_read<kRingPanels - 1>();
            }
            barrier_warp_sync();
            round_panel<Element>(O, normalisers, panel, box, lane);
            fence_proxy_async();
            barrier_warp_sync();
            if (lane == 0) copy_panel(map, box, panel, coordinates...);
        }
    }
}
