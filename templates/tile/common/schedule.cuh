// Which work a block does: block index -> (query tile, head, batch), and which key steps that takes.

// n / divisor, given `reciprocal` = ceil(2^64 / divisor), or 0 for a divisor of 1 (Lemire, Kaser and Kurz 2019: exact for 32 bits).
__device__ __forceinline__ int divide(int n, u64 reciprocal) { return reciprocal == 0 ? n : static_cast<int>(mul_hi(n, reciprocal)); }

struct Work {
    int query_tile, head, batch;
};

// The order of the blocks. Heads come in sections whose K and V fit into the L2 together. Within a section all heads' last query tiles come
// first: under a causal mask they have the most keys, and a launch should not end with the longest blocks. A section of one
// head has its query tiles next to each other.
struct Order {
    int query_tiles, section_heads, section_blocks;
    u64 section_heads_reciprocal, section_blocks_reciprocal;
};

__device__ __forceinline__ Work find_work(int block, const Order& order, int heads, u64 heads_reciprocal) {
    const int section = divide(block, order.section_blocks_reciprocal), within = block - section * order.section_blocks;
    const int tile = divide(within, order.section_heads_reciprocal);
    const int head_and_batch = section * order.section_heads + within - tile * order.section_heads;
    const int batch = divide(head_and_batch, heads_reciprocal);
    return {order.query_tiles - 1 - tile, head_and_batch - batch * heads, batch};
}

// Key steps [0, full) are seen whole by every query of the tile, [full, end) need masking, the rest is seen by none. Each query that sees keys
// sees one of [full, end), unless that is empty: what a row needs when it sees its first key is done there.
struct KeySteps {
    int full, end;
};

template <bool kCausal, int kBlockQ, int kStepKv>
__device__ __forceinline__ KeySteps find_key_steps(int first_query, int len_kv, int diagonal) {
    // The first query sees keys [0, seen_by_first), the last one [0, seen_by_last).
    const int seen_by_first = kCausal ? min(len_kv, max(0, first_query + 1 + diagonal)) : len_kv;
    const int seen_by_last = kCausal ? min(len_kv, max(0, first_query + kBlockQ + diagonal)) : len_kv;
    return {(seen_by_first - (seen_by_first < seen_by_last)) / kStepKv, (seen_by_last + kStepKv - 1) / kStepKv};
}
