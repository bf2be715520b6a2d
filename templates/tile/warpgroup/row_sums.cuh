// The row statistics that a consumer hands to its LSE writer: row sum and row max, through shared memory.

// A huge row has its shift in the place of row_max, and its total negated (see Origin).
struct RowStatistics {
    float total, row_max;

    __device__ __forceinline__ Origin origin() const { return total < 0.0f ? Origin{row_max, 0.0f} : Origin{0.0f, row_max}; }
};

// Two rows of a warp's 16, eight apart. A warpgroup has 32 such pairs, in the order of its warps and rows.
struct PairStatistics {
    RowStatistics rows[2];

    // All threads of the consumer call this, for the rows lane/4 and lane/4 + 8 of their warps; the quad of a row holds the same values.
    __device__ __forceinline__ void store(SharedAddress statistics) const {
        if (lane_index() % 4) return;
        const int pair = thread_index() / 32 % 4 * 8 + lane_index() / 4;
        store_shared_v4(statistics + pair * 16, {__float_as_uint(rows[0].total), __float_as_uint(rows[0].row_max),
                                                 __float_as_uint(rows[1].total), __float_as_uint(rows[1].row_max)});
    }
    // The LSE writer's lanes take one pair each, whose first row is first_row_of_pair().
    __device__ __forceinline__ static PairStatistics load(SharedAddress statistics) {
        const uint4 v = load_shared_v4(statistics + lane_index() * 16);
        return {{{__uint_as_float(v.x), __uint_as_float(v.y)}, {__uint_as_float(v.z), __uint_as_float(v.w)}}};
    }
    __device__ __forceinline__ static int first_row_of_pair() { return lane_index() / 8 * 16 + lane_index() % 8; }
};
