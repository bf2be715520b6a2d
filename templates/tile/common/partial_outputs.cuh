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

// Two sums of a row that are relative to different origins: the higher origin, and the factors that bring both sums to it.
struct CommonOrigin {
    Origin origin;
    float factors[2];

    __device__ __forceinline__ static CommonOrigin of(const Origin& a, const Origin& b, float scale_log2) {
        const float height = fmaf(b.shift - a.shift, scale_log2, b.row_max - a.row_max);  // of b's above a's
        const float factor = ex2_approx_ftz(-fabsf(height));
        if (height > 0.0f) return {b, {factor, 1.0f}};
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
    // The same of the first `count` parts at a time, with the highest of all origins. Four sums of totals round less than one.
    template <int kParts>
    __device__ __forceinline__ void add(const uint4 (&O)[kParts], const uint4 (&statistics)[kParts], int count, float scale_log2) {
        Origin highest = origin;
#pragma unroll
        for (int j = 0; j < kParts; ++j)
            if (j < count && height(origin_of(statistics[j]), highest, scale_log2) > 0.0f) highest = origin_of(statistics[j]);
        const float own = ex2_approx_ftz(height(origin, highest, scale_log2));
        float totals[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) columns[i] *= own;
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
            if (j >= count) continue;
            const float factor = ex2_approx_ftz(height(origin_of(statistics[j]), highest, scale_log2));
            const u32 given[4] = {O[j].x, O[j].y, O[j].z, O[j].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) columns[i] = fmaf(__uint_as_float(given[i]), factor, columns[i]);
            totals[j % 4] += __uint_as_float(statistics[j].x) * fmaf(factor, kEx2Bias, factor);
        }
        total = fmaf(total, fmaf(own, kEx2Bias, own), (totals[0] + totals[1]) + (totals[2] + totals[3]));
        origin = highest;
    }

  private:
    __device__ __forceinline__ static Origin origin_of(const uint4& statistics) {
        return {__uint_as_float(statistics.y), __uint_as_float(statistics.z)};
    }
    // Of one origin above another one, in base 2.
    __device__ __forceinline__ static float height(const Origin& a, const Origin& b, float scale_log2) {
        return fmaf(a.shift - b.shift, scale_log2, a.row_max - b.row_max);
    }
};

// Counts a part that is in memory. One thread calls this, after a barrier of those that wrote the part. True where it is the last one of
// its head: the caller's threads then merge, after another barrier. The counter, that of the head's first block, is 0 before and after: no
// other head has its first, but not its last part there.
__device__ __forceinline__ bool is_last_part(u32* counter, const HeadParts& parts) {
    if (atom_add_acq_rel_gpu(counter, 1) != static_cast<u32>(parts.count - 1)) return false;
    st_release_gpu(counter, 0);
    return true;
}

// So many groups of four columns that a thread adds up at a time, the first one and every `step`-th after it, as far as there are any, and
// so many parts of each. All of these loads are on their way together: their latency is what merging costs.
template <int kGroupsAtOnce, int kPartsAtOnce, int kColumns, class Store>
__device__ __forceinline__ void merge_groups(const PartialOutputs<kColumns>& partials, const HeadParts& parts, int first_group, int step,
                                             int end_group, float scale_log2, const Store& store) {
    constexpr int kGroups = kColumns / 4;  // of a row
    MergedRow merged[kGroupsAtOnce];
#pragma unroll 1
    for (int first = 0; first < parts.count; first += kPartsAtOnce) {
        uint4 O[kGroupsAtOnce][kPartsAtOnce], statistics[kGroupsAtOnce][kPartsAtOnce];
#pragma unroll
        for (int i = 0; i < kGroupsAtOnce; ++i)
#pragma unroll
            for (int j = 0; j < kPartsAtOnce; ++j) {
                // Beyond the last group or part it reads that one again: no branch keeps loads apart.
                const int group = min(first_group + i * step, end_group - 1), part = min(first + j, parts.count - 1);
                const float* row = partials.row(PartialOutputs<kColumns>::slot_of_part(parts, part), group / kGroups);
                O[i][j] = *reinterpret_cast<const uint4*>(row + group % kGroups * 4);
                statistics[i][j] = *reinterpret_cast<const uint4*>(row + kColumns);
            }
#pragma unroll
        for (int i = 0; i < kGroupsAtOnce; ++i) merged[i].add(O[i], statistics[i], parts.count - first, scale_log2);
    }
#pragma unroll
    for (int i = 0; i < kGroupsAtOnce; ++i) {
        const int group = first_group + i * step;
        if (group < end_group) store(group / kGroups, group % kGroups * 4, merged[i]);
    }
}

// Adds up the rows [first_row, end_row) of a head's parts. Thread `thread` of kThreads takes every so many-th group of four columns, for
// which it calls store(row, column, MergedRow).
template <int kThreads, int kColumns, class Store>
__device__ __forceinline__ void merge_parts(const PartialOutputs<kColumns>& partials, const HeadParts& parts, int first_row, int end_row,
                                            int thread, float scale_log2, const Store& store) {
    constexpr int kGroups = kColumns / 4;
    const int end = end_row * kGroups;
    int group = first_row * kGroups + thread;
    if (parts.count > 4) {
#pragma unroll 1
        for (; group < end; group += kThreads) merge_groups<1, 16>(partials, parts, group, kThreads, end, scale_log2, store);
    } else {
#pragma unroll 1
        for (; group + kThreads < end; group += kThreads * 4)
            merge_groups<4, 4>(partials, parts, group, kThreads, end, scale_log2, store);
        if (group < end) merge_groups<1, 4>(partials, parts, group, kThreads, end, scale_log2, store);
    }
}
