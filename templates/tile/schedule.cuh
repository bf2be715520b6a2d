// Which work a block does: block index -> (query tile, head, batch), and which key steps that takes.

// n / divisor, given `reciprocal` = ceil(2^64 / divisor), or 0 for a divisor of 1 (Lemire, Kaser and Kurz 2019: exact for 32 bits).
__device__ __forceinline__ int divide(int n, u64 reciprocal) { return reciprocal == 0 ? n : static_cast<int>(mul_hi(n, reciprocal)); }

struct Work {
    int query_tile, head, batch;
};

// Query tiles of one head are neighbours, so that blocks running together share K and V in L2. Under a causal mask the
// last query tiles have the most keys and go first.
template <bool kCausal>
__device__ __forceinline__ Work find_work(int block, int query_tiles, u64 query_tiles_reciprocal, int heads, u64 heads_reciprocal) {
    const int head_and_batch = divide(block, query_tiles_reciprocal), tile = block - head_and_batch * query_tiles;
    const int batch = divide(head_and_batch, heads_reciprocal);
    return {kCausal ? query_tiles - 1 - tile : tile, head_and_batch - batch * heads, batch};
}

// Key steps [0, full) are seen whole by every query of the tile, [full, end) need masking, the rest is seen by none.
struct KeySteps {
    int full, end;
};

template <bool kCausal, int kBlockQ, int kStepKv>
__device__ __forceinline__ KeySteps find_key_steps(int first_query, int len_kv, int diagonal) {
    // The first query sees keys [0, seen_by_first), the last one [0, seen_by_last).
    const int seen_by_first = kCausal ? min(len_kv, max(0, first_query + 1 + diagonal)) : len_kv;
    const int seen_by_last = kCausal ? min(len_kv, max(0, first_query + kBlockQ + diagonal)) : len_kv;
    return {seen_by_first / kStepKv, (seen_by_last + kStepKv - 1) / kStepKv};
}
