// The key tiles of sequences in a cache, for KeyShares. Each block adds up in shared memory how many there are before each sequence.

// Heads of sequences whose lengths are in memory. There is an entry in shared memory for each sequence, or where they are more than
// kEntries for each few of them, which are then looked for in memory.
//
// A part of a head takes its time beside that of its tiles. Where sequences are of different lengths blocks may have many parts or few, so
// that equal shares would not be equal in time: there each head has kPartCost tiles more, its first ones, without keys.
template <int kBlockKv, int kEntries, int kPartCost = 0>
struct CachedKeyTiles {
    static constexpr int kBytes = (kEntries + 1) * 4;
    CachedSequences sequences;
    int heads;                      // of each sequence
    int most;                       // tiles of a head that any of its queries may see
    int entries, entry_sequences;   // how many entries there are, and the sequences of each
    SharedAddress sums;             // of the tiles of a head, over all sequences before an entry's; behind the last entry over all
    int part_cost = 0;              // see above
    int border = 1;                 // a sequence's first tile begins at a multiple of so many positions
    u64 border_reciprocal = 0;
    int unit = 1;                   // tiles that count as one, where ints would not count all of them, or where shares are of splits

    template <class Parameters>
    __device__ __forceinline__ static CachedKeyTiles of(const Parameters& p, int heads, SharedAddress sums) {
        return {CachedSequences::of(p), heads, p.key_tiles, p.entries, p.entry_sequences, sums};
    }

    // Rows of a sequence's first tile before its first key.
    __device__ __forceinline__ int front(const KeySpan& span) const {
        return span.begin - divide(span.begin, border_reciprocal) * border;
    }
    // The sequence whose length a thread should ask for at the very beginning, as all else waits for it.
    __device__ __forceinline__ int own_sequence() const { return min(thread_index() * entry_sequences, sequences.batch - 1); }
    __device__ __forceinline__ KeySpan own_span() const { return sequences.span(own_sequence()); }

    // Writes the sums, which are there after the next barrier. All kThreads threads of the block call this, with their `own_span`.
    template <int kThreads>
    __device__ __forceinline__ void initialise(const KeySpan& own, const BlockScan<kThreads>& scan) const {
        if (thread_index() == 0) store_shared(sums, 0);
        if (entries <= 32) {
            if (thread_index() >= 32) return;
            const u32 behind = warp_inclusive<Sum>(thread_index() < entries ? tiles_of(own) : 0);
            if (thread_index() < entries) store_shared(sums + (thread_index() + 1) * 4, behind);
            return;
        }
        u32 before = 0;
#pragma unroll 1
        for (int begin = 0; begin < entries; begin += kThreads) {
            const int entry = begin + thread_index(), first = entry * entry_sequences;
            u32 tiles = begin == 0 && first < sequences.batch ? tiles_of(own) : 0;
            for (int batch = first + (begin == 0); batch < min(first + entry_sequences, sequences.batch); ++batch)
                tiles += tiles_of(sequences.span(batch));
            u32 all;
            const u32 behind = before + scan.template inclusive<Sum>(tiles, all);
            if (entry < entries) store_shared(sums + (entry + 1) * 4, behind);
            before += all;
        }
    }

    // Once the sums are there: what a part costs, nothing where all heads have equally many tiles. Whole warps call this.
    __device__ __forceinline__ void find_part_cost() {
        const int first = sum_before(1);
        bool differ = entry_sequences > 1;
#pragma unroll 1
        for (int entry = lane_index(); entry < entries; entry += 32) differ |= sum_before(entry + 1) - sum_before(entry) != first;
        if (vote_sync_any(differ)) part_cost = kPartCost;
    }

    __device__ __forceinline__ int tiles() const { return sum_before(entries) * heads; }
    // The head that a tile belongs to.
    __device__ __forceinline__ HeadTiles head_of(int tile) const {
        const int all = sum_before(entries), head = tile / all, number = tile - head * all;  // of a head in all sequences
        int entry = 0;
#pragma unroll 1
        for (int end = entries; end - entry > 1;) {
            const int middle = (entry + end) / 2;
            if (sum_before(middle) <= number) entry = middle;
            else end = middle;
        }
        int batch = entry * entry_sequences, before = sum_before(entry), count = count_of(batch);
#pragma unroll 1
        for (; number - before >= count; count = count_of(++batch)) before += count;
        return {batch, head, head * all + before, count, part_cost};
    }
    // The next one.
    __device__ __forceinline__ HeadTiles head_behind(const HeadTiles& head) const {
        const bool is_last = head.batch + 1 == sequences.batch;  // sequence
        const int batch = is_last ? 0 : head.batch + 1;
        return {batch, head.head + is_last, head.end(), count_of(batch), part_cost};
    }

  private:
    __device__ __forceinline__ int tiles_of(const KeySpan& span) const {
        const int tiles = max((front(span) + span.length() + kBlockKv - 1) / kBlockKv, 1);
        return min(unit == 1 ? tiles : (tiles + unit - 1) / unit, most);
    }
    __device__ __forceinline__ int count_of(int batch) const {
        return entry_sequences == 1 ? sum_before(batch + 1) - sum_before(batch) : tiles_of(sequences.span(batch)) + part_cost;
    }
    __device__ __forceinline__ int sum_before(int entry) const {
        return load_shared(sums + entry * 4) + min(entry * entry_sequences, sequences.batch) * part_cost;
    }
};
