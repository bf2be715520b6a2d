// What a row's log-sum-exp comes from, handed from the warpgroup that has summed it up to the warp that writes it.

// A huge row hands over its shift in place of the reference, and its total with the sign turned.
struct RowSum {
    float total, reference;

    __device__ __forceinline__ Origin origin() const { return total < 0.0f ? Origin{reference, 0.0f} : Origin{0.0f, reference}; }
};

// Of two rows of a warp's 16, eight apart. The warpgroup has 32 such pairs, in the order of its warps and rows.
struct RowSums {
    RowSum rows[2];

    // By the warpgroup: of rows lane/4 and lane/4 + 8 of each warp, the same in the four lanes that have them.
    __device__ __forceinline__ void store(SharedAddress sums) const {
        if (lane_index() % 4) return;
        const int pair = thread_index() / 32 % 4 * 8 + lane_index() / 4;
        store_shared_v4(sums + pair * 16, {__float_as_uint(rows[0].total), __float_as_uint(rows[0].reference), __float_as_uint(rows[1].total),
                                           __float_as_uint(rows[1].reference)});
    }
    // By one warp: a pair for each lane, of the rows from `first_row_of_pair` on.
    __device__ __forceinline__ static RowSums load(SharedAddress sums) {
        const uint4 v = load_shared_v4(sums + lane_index() * 16);
        return {{{__uint_as_float(v.x), __uint_as_float(v.y)}, {__uint_as_float(v.z), __uint_as_float(v.w)}}};
    }
    __device__ __forceinline__ static int first_row_of_pair() { return lane_index() / 8 * 16 + lane_index() % 8; }
};
