// Sums to which blocks add in one order, for gradients that are the same to the bit in every run: an fp32 sum rounds after each addition.
// For each warp or block that adds to a query tile, a semaphore in memory counts the key tiles that have added, and each of them waits for
// its turn. The last key tile that sees the queries is the first: under a causal mask it gets there first, since it begins with them.
//
// No block waits for ever, however few fit at once and whatever else the GPU does. The last key tile of a head has the lowest block index,
// so a block waits only for blocks of lower indices, and a GPU begins blocks in the order of their indices. (CUDA does not promise that,
// but decoupled look-back and stream-K rely on it, too.) Of the blocks that have not ended, the one with the lowest index has begun, and
// those that it waits for have ended and released all their semaphores. So it ends; then the next one does, and so on. The same goes
// for clusters: those of a launch are all of one shape, so that where a later one fits the next one does, too.

// The value at which key tile `key_tile` may add to a query tile: how many add before it, the later ones that its last query sees.
template <int kBlockQ, int kBlockKv, class... Links>
__device__ __forceinline__ u32 semaphore_value(const ScoreChain<Links...>& chain, int query_tile, int key_tile, int len_q) {
    const int last_query = min(query_tile * kBlockQ + kBlockQ, len_q) - 1;
    int end = 0x7fffffff;  // past the last key that it sees
    ((end = min(end, static_cast<const Links&>(chain).keys(last_query).end)), ...);
    return static_cast<u32>((end - 1) / kBlockKv - key_tile);
}

// The semaphore that a warp holds, if any. All its lanes call these together.
struct Semaphore {
    u32* held = nullptr;
    u32 next = 0;  // its value for the key tile that comes then

    // Returns once `semaphore` has the value `own`. The one held before is released first.
    __device__ __forceinline__ void acquire(u32* semaphore, u32 own) {
        release();
        if (lane_index() == 0)
            while (ld_acquire_gpu(semaphore) != own) {}
        barrier_warp_sync();
        held = semaphore, next = own + 1;
    }
    // For the next key tile. The release waits for additions that are under way, so the later it comes the less time it takes.
    __device__ __forceinline__ void release() {
        if (held == nullptr) return;
        barrier_warp_sync();
        if (lane_index() == 0) st_release_gpu(held, next);
        held = nullptr;
    }
};

// Zeroes the semaphores of a query tile, one for each of kWarps.
template <int kWarps>
__device__ __forceinline__ void clear_semaphores(u32* of_tile) {
    if (thread_index() < kWarps) of_tile[thread_index()] = 0;
}
