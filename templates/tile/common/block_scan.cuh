// Prefixes over the threads of a block.

struct Maximum {
    __device__ __forceinline__ static u32 of(u32 a, u32 b) { return a > b ? a : b; }
};
struct Sum {
    __device__ __forceinline__ static u32 of(u32 a, u32 b) { return a + b; }
};

// The same over the lanes of a warp, which call this together.
template <class Operation>
__device__ __forceinline__ u32 warp_inclusive(u32 value) {
    u32 of_lanes = value;  // at first of the lane, then of 2, 4 .. lanes
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 neighbours = shfl_sync_bfly(of_lanes, step);
        if (lane_index() & step) value = Operation::of(value, neighbours);
        of_lanes = Operation::of(of_lanes, neighbours);
    }
    return value;
}

// Prefixes over the threads of a block, of numbers for which 0 changes nothing.
template <int kThreads>
struct BlockScan {
    static constexpr int kWarps = kThreads / 32, kBytes = kWarps * 4;
    SharedAddress slots;

    // What this thread's value and those of all threads before it come to; `all`: of the whole block.
    template <class Operation>
    __device__ __forceinline__ u32 inclusive(u32 value, u32& all) const {
        u32 of_warp = value;  // at first of the lane, then of 2, 4 .. lanes
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u32 neighbours = shfl_sync_bfly(of_warp, step);
            if (lane_index() & step) value = Operation::of(value, neighbours);
            of_warp = Operation::of(of_warp, neighbours);
        }
        const int warp = warp_index();
        barrier_sync();  // all have read what the slots held before
        if (lane_index() == 0) store_shared(slots + warp * 4, of_warp);
        barrier_sync();
        all = 0;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) {
            if (i == warp) value = Operation::of(value, all);
            all = Operation::of(all, load_shared(slots + i * 4));
        }
        return value;
    }
};
