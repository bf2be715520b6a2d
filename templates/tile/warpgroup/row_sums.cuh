// The row statistics that a consumer hands to its LSE writer: row sum and row max, through shared memory.

// A huge row has its shift in the place of row_max, and its total negated (see Origin).
struct RowStatistics {
    float total, row_max;

    __device__ __forceinline__ Origin origin() const { return total < 0.0f ? Origin{row_max, 0.0f} : Origin{0.0f, row_max}; }
//% if renews
    // In lse an exponent errs in proportion to its distance from the row max, as scale_log2 is rounded. Few keys may have most of the
    // weight, and be far below the row max or above it: so the row max goes to where 2^2 such keys would be, by a whole number. What
    // rounds away there joins the total (Knuth's TwoSum). A huge row has its own maximum, and stays.
    __device__ __forceinline__ void settle() {
        if (!(total > 0.0f)) return;
        const int power = (__float_as_int(total) >> 23) - 127 - 2;
        const float by = static_cast<float>(power), before = row_max;
        row_max = before + by;
        const float added = row_max - before, rest = (before - (row_max - added)) + (by - added);
        total *= __int_as_float((127 - power) << 23);
        total = fmaf(total, rest * 0.693147181f, total);
    }
//% endif
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
