// What a row's log-sum-exp comes from, handed from the warpgroup that has summed it up to the warp that writes it.

struct RowSum {
    float total, reference;

    // Of row `row` of the warpgroup's 64.
    __device__ __forceinline__ static RowSum load(SharedAddress sums, int row) {
        const SharedAddress place = sums + (row / 16 * 8 + row % 8) * 16 + row / 8 % 2 * 8;
        return {__uint_as_float(load_shared(place)), __uint_as_float(load_shared(place + 4))};
    }
};

// Of a thread's two rows of 16, lane/4 + h*8: the same in the four lanes that have them.
struct RowSums {
    RowSum rows[2];

    __device__ __forceinline__ void store(SharedAddress sums) const {
        if (lane_index() % 4) return;
        const int place = thread_index() / 32 % 4 * 8 + lane_index() / 4;
        store_shared_v4(sums + place * 16, {__float_as_uint(rows[0].total), __float_as_uint(rows[0].reference), __float_as_uint(rows[1].total),
                                            __float_as_uint(rows[1].reference)});
    }
};

// natural + natural_low turns a reference into a scaled score: scale / scale_log2, about ln 2. A row that saw no key gets -inf.
__device__ __forceinline__ float log_sum_exp(const RowSum& row, float natural, float natural_low) {
    return row.total == 0.0f ? -infinity() : log_sum_exp(row.reference, row.total, natural, natural_low);
}
