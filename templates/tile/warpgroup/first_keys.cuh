// The first keys of a block whose sequences are in a cache: its share of the key tiles, and the boxes that it copies first. Both follow
// from lengths in memory, and take longer to find than the first keys take to come.
//
// The launch before may still change lengths. So a block looks at them ahead, while that launch ends, and once more behind it: if they are
// what they were, all that was found stands. Nothing may be read ahead by way of the L1, which would still have it behind.

template <class Traits>
struct FirstKeys {
    using KeyTiles = typename Traits::KeyTiles;
    static constexpr int kBoxWarp = 2;  // that finds boxes

    Shares<Traits> shares;
    Part<Traits> part;
    KeyBox box;  // of a lane of kBoxWarp, in the first batch

    // All threads of the block call this, which waits for the launch before. smem.initialise need not have met a barrier.
    template <int kThreads, class Parameters>
    __device__ __forceinline__ static FirstKeys find(const Parameters& p, const DecodeStorage<Traits>& smem) {
        auto key_tiles = KeyTiles::of(p, p.heads, smem.sums);
        key_tiles.border = p.border, key_tiles.border_reciprocal = p.border_reciprocal;
        bool ahead = p.batch <= kThreads && p.entry_sequences == 1;  // else there are lengths that no thread looks at twice
        if (!ahead) griddepcontrol_wait();
        KeySpan own = own_span(key_tiles);
#pragma unroll 1
        for (;; ahead = false) {
            key_tiles.template initialise<kThreads>(own, BlockScan<kThreads>{smem.scan});
            barrier_sync();
            FirstKeys found(p, key_tiles);
            if (ahead) griddepcontrol_wait();
            if (warp_index() == kBoxWarp) found.box.look_up(key_tiles.sequences);
            if (!ahead) return found;
            const KeySpan before = own;
            own = own_span(key_tiles);
            if (!any_of_block<kThreads>(own.begin != before.begin || own.end != before.end, smem.scan)) return found;
        }
    }

  private:
    // Whether it is true of any thread of the block. `slots`: a word for each warp, which nobody reads any more.
    template <int kThreads>
    __device__ __forceinline__ static bool any_of_block(bool value, SharedAddress slots) {
        const bool of_warp = vote_sync_any(value);
        const int warp = warp_index();
        if (lane_index() == 0) store_shared(slots + warp * 4, of_warp);
        barrier_sync();
        u32 found = 0;
#pragma unroll
        for (int i = 0; i < kThreads / 32; ++i) found |= load_shared(slots + i * 4);
        return found != 0;
    }
    // `key_tiles` are initialised.
    template <class Parameters>
    __device__ __forceinline__ FirstKeys(const Parameters& p, KeyTiles key_tiles)
        : shares(key_shares<Traits>(p, with_part_cost(key_tiles))), part(shares, own_share(p)), box{} {
        if (warp_index() != kBoxWarp) return;
        box = box_of_lane<Traits>(p, shares, part, part.begin, [&](int batch) { return span_now(key_tiles.sequences, batch); });
    }
    __device__ __forceinline__ static KeyTiles with_part_cost(KeyTiles key_tiles) {
        key_tiles.find_part_cost();
        return key_tiles;
    }
    __device__ __forceinline__ static KeySpan own_span(const KeyTiles& key_tiles) {
        return span_now(key_tiles.sequences, key_tiles.own_sequence());
    }
    __device__ __forceinline__ static KeySpan span_now(const CachedSequences& sequences, int batch) {
        const int padded = sequences.padding == nullptr ? 0 : ld_relaxed_gpu(sequences.padding + batch);
        return sequences.clamped(ld_relaxed_gpu(sequences.lengths + batch), padded);
    }
};
