// Which work a block does: block index -> (query tile, head, batch), and which key tiles that takes.

struct Work {
    int query_tile, head, batch;
};

// Query tiles of one head are neighbours, so that blocks running together share K and V in L2. Under a causal mask the
// last query tiles have the most keys and go first.
template <bool kCausal>
__device__ __forceinline__ Work find_work(int block, int query_tiles, int heads) {
    const int tile = block % query_tiles, head_and_batch = block / query_tiles;
    return {kCausal ? query_tiles - 1 - tile : tile, head_and_batch % heads, head_and_batch / heads};
}

// Key tiles [0, full) are seen whole by every query of the tile, [full, end) need masking, the rest is seen by none.
struct KeyTiles {
    int full, end;
};

template <bool kCausal, int kBlockQ, int kBlockKv>
__device__ __forceinline__ KeyTiles find_key_tiles(int first_query, int len_kv, int diagonal) {
    // The first query sees keys [0, seen_by_first), the last one [0, seen_by_last).
    const int seen_by_first = kCausal ? min(len_kv, max(0, first_query + 1 + diagonal)) : len_kv;
    const int seen_by_last = kCausal ? min(len_kv, max(0, first_query + kBlockQ + diagonal)) : len_kv;
    return {seen_by_first / kBlockKv, (seen_by_last + kBlockKv - 1) / kBlockKv};
}
