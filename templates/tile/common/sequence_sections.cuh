// Where packed sequences lie by what the device says, and rows that are in none of them: for the kernel `_sequences`.
//
// What the device says may be wrong. Boundaries are clamped to the tokens that there are, and one that is lower than one before it counts
// as that: so sequences are never outside of the tensors, and share no tokens.

// Shared memory of the kernel `_sequences`, of which the block that lists tiles uses all.
constexpr int kLengthClasses = 256;  // by which sequences are sorted
template <int kThreads>
struct SequencesStorage {
    BlockScan<kThreads> scan;
    SharedAddress counts;  // of each warp and class of lengths
    SharedAddress slots;   // twice 16 bytes for each thread

    __device__ __forceinline__ explicit SequencesStorage(SharedRegions& regions) {
        slots = regions.take(kThreads * 32);
        counts = regions.take(kThreads / 32 * kLengthClasses * 4);
        scan.slots = regions.take(BlockScan<kThreads>::kBytes);
    }
    __device__ __forceinline__ SharedAddress slot(int thread) const { return slots + thread * 16; }
    __device__ __forceinline__ SharedAddress rows(int thread) const { return slots + (kThreads + thread) * 16; }
};

// Tokens from a boundary to the next one, of which the first `used` are those of a sequence.
struct Section {
    int begin, used, end;

    // Given the boundaries as they are said to be, and the highest one of all before the block's first, which becomes that of all.
    template <int kThreads>
    __device__ __forceinline__ Section in_order(const BlockScan<kThreads>& scan, int& highest) const {
        u32 all;
        const int up_to_here = static_cast<int>(scan.template inclusive<Maximum>(begin, all));
        const int first = max(up_to_here, highest), behind = max(first, end);
        highest = max(highest, static_cast<int>(all));
        return {first, min(max(used, 0), behind - first), behind};
    }
};

// Boundaries of sequences on one side, and how much of each is used.
struct Boundaries {
    const int *cu_seqlens, *seqused;  // [batch + 1], and [batch] or null
    int batch, tokens;

    // Clamped; 0 before the first one, and `tokens` behind the last one.
    __device__ __forceinline__ int at(int index) const {
        if (index < 0) return 0;
        return index > batch ? tokens : min(max(cu_seqlens[index], 0), tokens);
    }
    // From a boundary to the next one, as is said.
    __device__ __forceinline__ Section section(int index) const {
        const bool is_sequence = index >= 0 && index < batch;
        return {at(index), !is_sequence ? 0 : seqused == nullptr ? tokens : seqused[index], at(index + 1)};
    }
};

// Zeros in a row of a tensor, of all heads, by a warp. Strides are those of elements of 2 bytes.
template <int kWidth>
__device__ __forceinline__ void clear_row(u32* tensor, i64 row_stride, i64 head_stride, int heads, int row) {
    constexpr int kVectors = kWidth / 8;
    for (int i = lane_index(); i < heads * kVectors; i += 32) {
        const i64 offset = row * row_stride + i / kVectors * head_stride + i % kVectors * 8;
        *reinterpret_cast<uint4*>(tensor + offset / 2) = {0, 0, 0, 0};
    }
}

// Calls clear(row) for this warp's share of the rows that are in no sequence: it is number `number` of the `warps` that share all of them.
template <int kThreads, class Clear>
__device__ __forceinline__ void for_unused_rows(const Boundaries& boundaries, const SequencesStorage<kThreads>& smem, int number, int warps,
                                                const Clear& clear) {
    int highest = 0;
    for (int first = -1; first <= boundaries.batch; first += kThreads) {  // sections before the first sequence and behind the last one, too
        const int index = first + thread_index();
        const Section section = boundaries.section(index).in_order(smem.scan, highest);
        const u32 unused = index > boundaries.batch ? 0 : section.end - section.begin - section.used;
        u32 all;
        const u32 behind = smem.scan.template inclusive<Sum>(unused, all);
        if (all == 0) continue;
        const SharedAddress own = smem.slot(thread_index());
        store_shared(own, behind - unused);
        store_shared(own + 4, section.begin + section.used);
        barrier_sync();
        for (u32 row = number; row < all; row += warps) {
            int found = 0;  // the last section that begins at this row or before
#pragma unroll
            for (int step = kThreads / 2; step > 0; step /= 2)
                if (load_shared(smem.slot(found + step)) <= row) found += step;
            clear(static_cast<int>(load_shared(smem.slot(found) + 4) + row - load_shared(smem.slot(found))));
        }
        barrier_sync();
    }
}

// out = 0 and lse = -inf in rows of no sequence, for the forward pass.
template <int kHeadDimV, int kThreads, class Parameters>
__device__ __forceinline__ void clear_unused_rows(const Parameters& p, const SequencesStorage<kThreads>& smem, int number, int warps) {
    for_unused_rows({p.cu_seqlens_q, p.seqused_q, p.batch, p.tokens_q}, smem, number, warps, [&](int row) {
        clear_row<kHeadDimV>(p.out, p.out_row, p.out_head, p.heads_q, row);
        if (p.lse == nullptr) return;
        for (int head = lane_index(); head < p.heads_q; head += 32) p.lse[static_cast<i64>(head) * p.tokens_q + row] = -infinity();
    });
}
