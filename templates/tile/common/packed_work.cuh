// Lists of tiles of packed sequences, the longest sequence last: what the kernel `_sequences` makes before kernels that compute them. One
// block sorts and lists, whatever the batch, and always in the same way.

// Tiles of kRows queries in a list.
template <int kRows>
struct QueryTiles {
    // What sequences are sorted by: the keys that each tile has to visit.
    __device__ __forceinline__ static int work(const SequenceRows& rows) { return rows.len_kv; }
    __device__ __forceinline__ static int count(const SequenceRows& rows) { return (rows.len_q + kRows - 1) / kRows; }
    __device__ __forceinline__ static int first_row(int index, int) { return index * kRows; }
};

// Sequences by what each tile has to visit, in classes an eighth of a power of two wide, in units of 16 rows.
__device__ __forceinline__ int length_class(int visited) {
    const int units = visited / 16, power = 31 - leading_zeros(units | 8);
    return power == 3 && units < 8 ? units : (power - 2) * 8 + (units >> (power - 3) & 7);
}

// The lanes of a warp that are of one class with this one, of those that have a sequence at all.
__device__ __forceinline__ u32 lanes_of_class(int own, bool is_there) {
    u32 same = vote_sync_ballot(is_there);
#pragma unroll
    for (int bit = 1; bit < kLengthClasses; bit *= 2) {
        const u32 with_bit = vote_sync_ballot(own & bit);
        same &= own & bit ? with_bit : ~with_bit;
    }
    return is_there ? same : 0;
}

// A counting sort of the sequences by class, the shortest first. Each warp counts and places sequences that follow each other, so that
// those of a class stay in their order, whoever comes first.
template <class Tiles, int kThreads>
struct SequenceSort {
    static constexpr int kWarps = kThreads / 32;
    static_assert(kThreads >= kLengthClasses, "a thread for each class");
    SharedAddress counts;  // of each warp and class; then where its next sequence goes

    __device__ __forceinline__ SharedAddress count_of(int warp, int of_class) const {
        return counts + (warp * kLengthClasses + of_class) * 4;
    }
    // rows: those of each sequence; sorted: becomes their numbers
    __device__ __forceinline__ void sort(const uint4* rows, u32* sorted, int batch, const BlockScan<kThreads>& scan) const {
        for (int i = thread_index(); i < kWarps * kLengthClasses; i += kThreads) store_shared(counts + i * 4, 0);
        barrier_sync();
        visit(rows, batch, [](int, u32) {});
        barrier_sync();
        u32 of_class = 0, all;
        if (thread_index() < kLengthClasses)
            for (int warp = 0; warp < kWarps; ++warp) of_class += load_shared(count_of(warp, thread_index()));
        u32 next = scan.template inclusive<Sum>(of_class, all) - of_class;
        if (thread_index() < kLengthClasses) {
            for (int warp = 0; warp < kWarps; ++warp) {
                const u32 count = load_shared(count_of(warp, thread_index()));
                store_shared(count_of(warp, thread_index()), next);
                next += count;
            }
        }
        barrier_sync();
        visit(rows, batch, [&](int sequence, u32 index) { sorted[index] = sequence; });
    }

  private:
    // Calls `found` for each of the warp's sequences with the count of its class so far, and counts it.
    template <class Found>
    __device__ __forceinline__ void visit(const uint4* rows, int batch, const Found& found) const {
        const int each = (batch + kThreads - 1) / kThreads * 32, warp = warp_index(), end = min((warp + 1) * each, batch);
        for (int first = warp * each; first < end; first += 32) {
            const int sequence = first + lane_index();
            const bool is_there = sequence < end;
            const int own = is_there ? length_class(Tiles::work(SequenceRows::of(rows[sequence]))) : 0;
            const u32 same = lanes_of_class(own, is_there), before = same & ((1u << lane_index()) - 1);
            const u32 count = is_there ? load_shared(count_of(warp, own)) : 0;
            if (is_there) found(sequence, count + popc(before));
            barrier_warp_sync();
            if (is_there && before == 0) store_shared(count_of(warp, own), count + popc(same));
            barrier_warp_sync();
        }
    }
};

// Lists the tiles of `sequences` sequences, each of another thread, from the first one on: of each so many, from `begin` on. Warps take one
// after the other, whoever's it is.
template <class Tiles, int kThreads>
__device__ __forceinline__ void list_tiles_of_threads(const WorkList& list, const SequencesStorage<kThreads>& smem, int sequences,
                                                      u32 sequence, const SequenceRows& rows, u32 begin, u32 tiles) {
    store_shared_v4(smem.slot(thread_index()), {sequence, begin, tiles, 0});
    store_shared_v4(smem.rows(thread_index()), rows.vector());
    barrier_sync();
    for (int thread = warp_index(); thread < sequences; thread += kThreads / 32) {
        const uint4 of_thread = load_shared_v4(smem.slot(thread)), its_rows = load_shared_v4(smem.rows(thread));
        for (u32 tile = lane_index(); tile < of_thread.z; tile += 32) {
            const int first_row = Tiles::first_row(tile, of_thread.z);
            list.store_tile(of_thread.y + tile, {static_cast<int>(of_thread.x), first_row, SequenceRows::of(its_rows)});
        }
    }
}

// The list of a batch that has a thread for each sequence. What comes before a sequence its thread finds by looking at all of them. Returns
// how many tiles there are.
template <class Tiles, int kThreads, class Parameters>
__device__ __forceinline__ u32 list_few(const Parameters& p, const SequencesStorage<kThreads>& smem, const WorkList& list,
                                        const Boundaries& of_q, const Boundaries& of_kv) {
    const int sequence = thread_index();
    const Section said_q = of_q.section(sequence), said_kv = of_kv.section(sequence);  // all loads at once
    int highest_q = 0, highest_kv = 0;
    const Section q = said_q.in_order(smem.scan, highest_q), kv = said_kv.in_order(smem.scan, highest_kv);
    const SequenceRows own{q.begin, q.used, kv.begin, kv.used};
    const u32 tiles = sequence < p.batch ? Tiles::count(own) : 0;
    store_shared_v4(smem.rows(sequence), {static_cast<u32>(Tiles::work(own)), tiles, 0, 0});
    barrier_sync();
    u32 begin = 0, all = 0;
    for (int other = 0; other < p.batch; ++other) {
        const uint4 its = load_shared_v4(smem.rows(other));
        const int longer_by = static_cast<int>(its.x) - Tiles::work(own);
        begin += longer_by < 0 || (longer_by == 0 && other < sequence) ? its.y : 0;
        all += its.y;
    }
    barrier_sync();
    list_tiles_of_threads<Tiles>(list, smem, p.batch, sequence, own, begin, tiles);
    return all;
}

// The same of any batch.
template <class Tiles, int kThreads, class Parameters>
__device__ __forceinline__ u32 list_many(const Parameters& p, const SequencesStorage<kThreads>& smem, const WorkList& list,
                                         const Boundaries& of_q, const Boundaries& of_kv) {
    uint4* rows = reinterpret_cast<uint4*>(p.sequence_rows);
    int highest_q = 0, highest_kv = 0;
    for (int first = 0; first < p.batch; first += kThreads) {
        const int sequence = first + thread_index();
        const Section said_q = of_q.section(sequence), said_kv = of_kv.section(sequence);
        const Section q = said_q.in_order(smem.scan, highest_q), kv = said_kv.in_order(smem.scan, highest_kv);
        if (sequence < p.batch) rows[sequence] = SequenceRows{q.begin, q.used, kv.begin, kv.used}.vector();
    }
    barrier_sync();  // after it all threads of the block see the rows
    SequenceSort<Tiles, kThreads>{smem.counts}.sort(rows, p.sequence_order, p.batch, smem.scan);
    barrier_sync();
    u32 listed = 0;
    for (int first = 0; first < p.batch; first += kThreads) {
        const int index = first + thread_index();
        const u32 sequence = index < p.batch ? p.sequence_order[index] : 0;
        const SequenceRows found = SequenceRows::of(rows[sequence]);
        const u32 tiles = index < p.batch ? Tiles::count(found) : 0;
        u32 all;
        const u32 begin = listed + smem.scan.template inclusive<Sum>(tiles, all) - tiles;
        list_tiles_of_threads<Tiles>(list, smem, min(kThreads, p.batch - first), sequence, found, begin, tiles);
        listed += all;
        barrier_sync();  // nobody reads the slots any more
    }
    return listed;
}

// One block writes a list. `words`: where; heads: of an L2 group.
template <class Tiles, int kThreads, class Parameters>
__device__ __forceinline__ void list_tiles(const Parameters& p, u32* words, int heads, const SequencesStorage<kThreads>& smem) {
    const Boundaries of_q{p.cu_seqlens_q, p.seqused_q, p.batch, p.tokens_q}, of_kv{p.cu_seqlens_kv, p.seqused_kv, p.batch, p.tokens_kv};
    const WorkList list{words, 0, 0};
    const u32 listed = p.batch <= kThreads ? list_few<Tiles>(p, smem, list, of_q, of_kv) : list_many<Tiles>(p, smem, list, of_q, of_kv);
    const u64 of_group = static_cast<u64>(heads) * listed;
    if (thread_index() == 0) WorkList{words, static_cast<int>(listed), of_group > 1 ? ~0ull / of_group + 1 : 0}.store_length();
}

// Query tiles, for the forward pass.
template <int kBlockQ, int kThreads, class Parameters>
__device__ __forceinline__ void list_query_tiles(const Parameters& p, const SequencesStorage<kThreads>& smem) {
    list_tiles<QueryTiles<kBlockQ>>(p, p.work_list, p.l2_group_heads, smem);
}
