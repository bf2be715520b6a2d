// The tile scheduler: from a block's index, or that of a claimed tile, to its work tile, and which key steps a work tile takes.

// n / divisor, given `reciprocal` = ceil(2^64 / divisor), or 0 for a divisor of 1 (Lemire, Kaser and Kurz 2019: exact for 32 bits).
__device__ __forceinline__ int divide(int n, u64 reciprocal) { return reciprocal == 0 ? n : static_cast<int>(mul_hi(n, reciprocal)); }

struct WorkTile {
    int query_tile, head, batch;
};

// L2 swizzle by groups of heads: the K and V of a group fit into the L2 together, and one group comes after the other. Within a group the
// longest work tiles come first (LPT scheduling): under a causal mask those are the last query tiles. In a group of one head the query
// tiles of the head follow each other.
struct TileScheduler {
    int head_tiles, l2_group_heads, l2_group_blocks;
    u64 l2_group_heads_reciprocal, l2_group_blocks_reciprocal;

    template <class Parameters>
    __device__ __forceinline__ static TileScheduler of(const Parameters& p, int head_tiles) {
        return {head_tiles, p.l2_group_heads, p.l2_group_blocks, p.l2_group_heads_reciprocal, p.l2_group_blocks_reciprocal};
    }
};

// The work tile of number `index`. `heads`: of a batch entry, or sets of heads that share tiles; l2_group_heads divides them all.
__device__ __forceinline__ WorkTile find_work_tile(int index, const TileScheduler& scheduler, int heads, u64 heads_reciprocal) {
    const int group = divide(index, scheduler.l2_group_blocks_reciprocal), within = index - group * scheduler.l2_group_blocks;
    const int tile = divide(within, scheduler.l2_group_heads_reciprocal);
    const int head_and_batch = group * scheduler.l2_group_heads + within - tile * scheduler.l2_group_heads;
    const int batch = divide(head_and_batch, heads_reciprocal);
    return {scheduler.head_tiles - 1 - tile, head_and_batch - batch * heads, batch};
}

// Every query of the tile sees all keys of the steps [0, full). The steps [full, end) take the mask, and no query sees the others. Steps
// are visited from the last to the first. Where the queries of a tile differ in their last visible key, the step of the first query's last
// key counts as masked even if it is full: a row meets its first visible key there, and softmax must update its row max.
struct KeySteps {
    int full, end;
};

template <bool kCausal, int kBlockQ, int kStepKv>
__device__ __forceinline__ KeySteps find_key_steps(int first_query, int len_kv, int causal_offset) {
    // The first query of the tile sees the keys [0, seen_by_first), the last one [0, seen_by_last).
    const int seen_by_first = kCausal ? min(len_kv, max(0, first_query + 1 + causal_offset)) : len_kv;
    const int seen_by_last = kCausal ? min(len_kv, max(0, first_query + kBlockQ + causal_offset)) : len_kv;
    return {(seen_by_first - (seen_by_first < seen_by_last)) / kStepKv, (seen_by_last + kStepKv - 1) / kStepKv};
}
