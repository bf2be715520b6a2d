// Sums to which blocks add in one order, for gradients that are the same to the bit in every run: an fp32 sum rounds after each addition.
// For each warp or block that adds to a query tile, a counter in memory says how many key tiles have added, and each of them waits for its
// turn. The last key tile that sees the queries is the first: under a causal mask it gets there first, since it begins with them.
//
// No block waits for ever, however few fit at once and whatever else the GPU does. The last key tile of a head has the lowest block index,
// so a block waits only for blocks of lower indices, and a GPU begins blocks in the order of their indices. (CUDA does not promise that,
// but decoupled look-back and stream-K rely on it, too.) Of the blocks that have not ended, the one with the lowest index has begun, and
// those that it waits for have ended and passed on all their turns. So it ends; then the next one does, and so on. The same goes
// for clusters: those of a launch are all of one shape, so that where a later one fits the next one does, too.

// How many key tiles add to a query tile before key tile `key_tile`: the later ones that its last query sees.
template <int kBlockQ, int kBlockKv, class... Links>
__device__ __forceinline__ u32 find_turn(const ScoreChain<Links...>& chain, int query_tile, int key_tile, int len_q) {
    const int last_query = min(query_tile * kBlockQ + kBlockQ, len_q) - 1;
    int end = 0x7fffffff;  // past the last key that it sees
    ((end = min(end, static_cast<const Links&>(chain).keys(last_query).end)), ...);
    return static_cast<u32>((end - 1) / kBlockKv - key_tile);
}

// The turn that a warp has. All its lanes call these together.
struct Turn {
    u32* counter = nullptr;  // of what the warp has added to last; null once it has passed the turn on
    u32 next = 0;            // whose turn it is then

    // Returns once it is turn `own` to add to what `of_sums` counts additions to. The turn before is passed on first.
    __device__ __forceinline__ void wait(u32* of_sums, u32 own) {
        pass();
        if (lane_index() == 0)
            while (ld_acquire_gpu(of_sums) != own) {}
        barrier_warp_sync();
        counter = of_sums, next = own + 1;
    }
    // To the next key tile. The release waits for additions that are under way, so the later it comes the less time it takes.
    __device__ __forceinline__ void pass() {
        if (counter == nullptr) return;
        barrier_warp_sync();
        if (lane_index() == 0) st_release_gpu(counter, next);
        counter = nullptr;
    }
};

// Zeroes the counters of a query tile, one for each of kWarps.
template <int kWarps>
__device__ __forceinline__ void clear_turns(u32* of_tile) {
    if (thread_index() < kWarps) of_tile[thread_index()] = 0;
}
