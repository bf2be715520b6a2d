// Outputs of parts of a head, which meet some of its keys only, and how they become the head's output: each block that has a part writes it
// to memory, and whoever finds that all others have done so adds them up (in FlashAttention a second kernel does, "combine"). It
// adds from the first part to the last one, whatever the order in which they arrived, so results are the same to the bit in every run.

// Rows of O in fp32, not normalised, and with each its row sum and origin. A block has at most two parts that are not whole heads, the
// first and the last of its share, and a slot for each.
template <int kColumns>
struct PartialOutputs {
    static constexpr int kRowFloats = kColumns + 4;  // total, shift, row_max and one more, for an alignment of 16 bytes
    static_assert(kColumns % 4 == 0, "rows are read by 16 bytes");
    float* slots;
    int rows;  // of a slot

    __device__ __forceinline__ int slot_floats() const { return rows * kRowFloats; }
    __device__ __forceinline__ float* row(int slot, int row) const {
        return slots + (static_cast<i64>(slot) * rows + row) * kRowFloats;
    }
    __device__ __forceinline__ static int slot_of(int block, bool is_first) { return block * 2 + (is_first ? 0 : 1); }
    // The slot of a head's part, from 0 on. Only the first one may come behind others in its block.
    __device__ __forceinline__ static int slot_of_part(const HeadParts& parts, int part) {
        return slot_of(parts.first_block + part, part > 0 || parts.begins_share);
    }
    __device__ __forceinline__ static void store_statistics(float* row, float total, const Origin& origin) {
        *reinterpret_cast<uint4*>(row + kColumns) = {__float_as_uint(total), __float_as_uint(origin.shift),
                                                     __float_as_uint(origin.row_max), 0};
    }
};

// Of one origin above another one, in base 2. That of a row without keys is below all others, however low these are.
__device__ __forceinline__ float height_above(const Origin& a, const Origin& b, float scale_log2) {
    const bool has_keys[2] = {a.row_max != kInitialRowMax, b.row_max != kInitialRowMax};
    if (!has_keys[0] || !has_keys[1]) return has_keys[0] == has_keys[1] ? 0.0f : has_keys[0] ? infinity() : -infinity();
    return fmaf(a.shift - b.shift, scale_log2, a.row_max - b.row_max);
}

// Two sums of a row that are relative to different origins: the higher origin, and the factors that bring both sums to it.
struct CommonOrigin {
    Origin origin;
    float factors[2];

    __device__ __forceinline__ static CommonOrigin of(const Origin& a, const Origin& b, float scale_log2) {
        const float b_above_a = height_above(b, a, scale_log2);
        const float factor = ex2_approx_ftz(-fabsf(b_above_a));
        if (b_above_a > 0.0f) return {b, {factor, 1.0f}};
        return {a, {1.0f, factor}};
    }
    // What the sum of both is, corrected as in OnlineSoftmax.
    __device__ __forceinline__ float total(float a, float b) const { return a * corrected(0) + b * corrected(1); }

  private:
    __device__ __forceinline__ float corrected(int i) const { return fmaf(factors[i], kEx2Bias, factors[i]); }
};

// A row of all parts together: four neighbouring columns of O, not normalised.
struct MergedRow {
    float columns[4] = {};
    float total = 0.0f;
    Origin origin{0.0f, kInitialRowMax};

    __device__ __forceinline__ void add(const uint4& O, const uint4& statistics, float scale_log2) {
        const float own_total = __uint_as_float(statistics.x);
        const Origin own{__uint_as_float(statistics.y), __uint_as_float(statistics.z)};
        const CommonOrigin common = CommonOrigin::of(origin, own, scale_log2);
        const u32 given[4] = {O.x, O.y, O.z, O.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) columns[i] = columns[i] * common.factors[0] + __uint_as_float(given[i]) * common.factors[1];
        total = common.total(total, own_total);
        origin = common.origin;
    }
    // The same of `count` parts at a time, at most kParts, with their highest origin. Lane l of the warp has the statistics of part
    // l % kParts; all lanes have the same row, and `O` of all parts for their own columns, zeros where there is no part.
    template <int kParts>
    __device__ __forceinline__ void add(const uint4 (&O)[kParts], const uint4& statistics, int count, float scale_log2) {
        const bool exists = lane_index() % kParts < count;
        const Origin own{__uint_as_float(statistics.y), __uint_as_float(statistics.z)};
        Origin highest = exists ? own : origin;
#pragma unroll
        for (int distance = 1; distance < kParts; distance *= 2) {
            const Origin other{shfl_sync_bfly(highest.shift, distance), shfl_sync_bfly(highest.row_max, distance)};
            if (height_above(other, highest, scale_log2) > 0.0f) highest = other;
        }
        if (!(height_above(origin, highest, scale_log2) < 0.0f)) highest = origin;
        highest = {shfl_sync_idx(highest.shift, 0), shfl_sync_idx(highest.row_max, 0)};  // of equals one for all

        const float factor = exists ? ex2_approx_ftz(height_above(own, highest, scale_log2)) : 0.0f;
        float totals = exists ? __uint_as_float(statistics.x) * fmaf(factor, kEx2Bias, factor) : 0.0f;
#pragma unroll
        for (int distance = 1; distance < kParts; distance *= 2) totals += shfl_sync_bfly(totals, distance);
        const float before = ex2_approx_ftz(height_above(origin, highest, scale_log2));
        total = fmaf(total, fmaf(before, kEx2Bias, before), totals);
        origin = highest;
#pragma unroll
        for (int i = 0; i < 4; ++i) columns[i] *= before;
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
            const float by = shfl_sync_idx(factor, j);
            const u32 given[4] = {O[j].x, O[j].y, O[j].z, O[j].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) columns[i] = fmaf(__uint_as_float(given[i]), by, columns[i]);
        }
    }
};

// Counts a part that is in memory. One thread calls this, after a barrier of those that wrote the part. True where it is the last one of
// its head: the caller's threads then merge, after another barrier. The counter, that of the head's first block, is 0 before and after: no
// other head has its first, but not its last part there.
__device__ __forceinline__ bool is_last_part(u32* counter, const HeadParts& parts) {
    if (atom_add_acq_rel_gpu(counter, 1) != static_cast<u32>(parts.count - 1)) return false;
    *counter = 0;  // nobody else looks at it before the launch has ended
    return true;
}

// A warp adds up a row of a head's parts, four columns a lane from `first_column` on, and calls store(row, column, MergedRow). kParts of
// them are on their way from memory at a time: their latency is most of what merging costs, and a warp's instructions one by one are the
// rest.
template <int kParts, int kColumns, class Store>
__device__ __forceinline__ void merge_row(const PartialOutputs<kColumns>& partials, const HeadParts& parts, int row, int first_column,
                                          float scale_log2, const Store& store) {
    const int lane = lane_index(), column = min(first_column + lane * 4, kColumns - 4);
    const auto part_at = [&](int part) { return partials.row(PartialOutputs<kColumns>::slot_of_part(parts, part), row); };
    MergedRow merged;
#pragma unroll 1
    for (int first = 0; first < parts.count; first += kParts) {
        const uint4 statistics = *reinterpret_cast<const uint4*>(part_at(min(first + lane % kParts, parts.count - 1)) + kColumns);
        uint4 O[kParts] = {};
        O[0] = *reinterpret_cast<const uint4*>(part_at(first) + column);
        // From the second one on they are two slots apart. One multiplication and addition is all that each address takes.
        const char* from = reinterpret_cast<const char*>(part_at(first + 1) + column);
        u32 distance = 2 * sizeof(float) * partials.slot_floats();
        launder(distance);  // else its multiples, which never change, would occupy registers all the time
#pragma unroll
        for (int j = 1; j < kParts; ++j)
            if (first + j < parts.count) O[j] = *reinterpret_cast<const uint4*>(from + u64{distance} * (j - 1));
        merged.add(O, statistics, parts.count - first, scale_log2);
    }
    if (first_column + lane * 4 < kColumns) store(row, column, merged);
}

// Adds up the rows [first_row, end_row) of a head's parts, by so many `warps`, of which this one is `warp`.
template <int kColumns, class Store>
__device__ __forceinline__ void merge_rows(const PartialOutputs<kColumns>& partials, const HeadParts& parts, int first_row, int end_row,
                                           int warp, int warps, float scale_log2, const Store& store) {
    constexpr int kPieces = (kColumns + 127) / 128;    // of a row, as many columns each as a warp adds up
    constexpr int kAtOnce = kColumns > 128 ? 8 : 16;  // parts, where a thread has registers for them beside its kernel's accumulators
#pragma unroll 1
    for (int i = first_row * kPieces + warp; i < end_row * kPieces; i += warps) {
        const int row = i / kPieces, column = i % kPieces * 128;
        if (parts.count <= 4) merge_row<4>(partials, parts, row, column, scale_log2, store);
        else merge_row<kAtOnce>(partials, parts, row, column, scale_log2, store);
    }
}

// The same by kThreads threads, whole warps, of which this one is `thread`.
template <int kThreads, int kColumns, class Store>
__device__ __forceinline__ void merge_parts(const PartialOutputs<kColumns>& partials, const HeadParts& parts, int first_row, int end_row,
                                            int thread, float scale_log2, const Store& store) {
    merge_rows(partials, parts, first_row, end_row, shfl_sync_first(thread / 32), kThreads / 32, scale_log2, store);
}
