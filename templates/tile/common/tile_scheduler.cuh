// The tile scheduler: from a block's index, or that of a claimed tile, to its work tile.

// n / divisor, for n >= 0, given `reciprocal` = ceil(2^64 / divisor), or 0 for a divisor of 1 (Lemire, Kaser and Kurz 2019: exact for 32
// bits).
__device__ __forceinline__ int divide(int n, u64 reciprocal) { return reciprocal == 0 ? n : static_cast<int>(mul_hi(n, reciprocal)); }

struct WorkTile {
    int tile;   // number among the head's query tiles, of which the last one is handed out first
    int head;   // number of the head, or under PackGQA of the set of heads that share tiles
    int batch;
};

// L2 swizzle by groups of heads: what all tiles of a group read fits into the L2 together (K and V; in the backward pass Q, dO and the sums
// of dQ), and one group comes after the other. Within a group the longest work tiles come first (LPT scheduling): under a causal mask the
// last query tiles, or in the backward pass the first key tiles. In a group of one head the tiles of the head follow each
// other.
struct TileScheduler {
    int head_tiles;      // tiles of each head
    int l2_group_heads;  // heads of an L2 group
    int l2_group_tiles;  // work tiles of an L2 group
    u64 l2_group_heads_reciprocal, l2_group_tiles_reciprocal;

    template <class Parameters>
    __device__ __forceinline__ static TileScheduler of(const Parameters& p, int head_tiles) {
        return {head_tiles, p.l2_group_heads, p.l2_group_tiles, p.l2_group_heads_reciprocal, p.l2_group_tiles_reciprocal};
    }
};

// The work tile of number `index`; the last tiles of heads come first. `heads`: heads of a batch entry, or its sets of heads that share
// tiles. heads * batch is a multiple of l2_group_heads.
__device__ __forceinline__ WorkTile find_work_tile(int index, const TileScheduler& scheduler, int heads, u64 heads_reciprocal) {
    const int l2_group = divide(index, scheduler.l2_group_tiles_reciprocal), within = index - l2_group * scheduler.l2_group_tiles;
    const int tile = divide(within, scheduler.l2_group_heads_reciprocal);
    const int head_and_batch = l2_group * scheduler.l2_group_heads + within - tile * scheduler.l2_group_heads;
    const int batch = divide(head_and_batch, heads_reciprocal);
    return {scheduler.head_tiles - 1 - tile, head_and_batch - batch * heads, batch};
}
