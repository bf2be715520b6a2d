// In which order blocks of a backward pass take the key tiles of a head, where masks hide keys of no range: those that the most query tiles
// see come first (LPT scheduling), so that a launch ends with the shortest work tiles.
//
// p.key_order has a number for each row of SeenTiles; rows of heads that share keys have one order, which lies at the first of them. It is
// null where a head has more rows than one block should rank: then they come one behind the other.

// By the first blocks of a kernel behind `_tiles`, one for each order. p.key_counts: memory for how many tiles see each key tile.
template <int kThreads, class Parameters>
__device__ __forceinline__ void order_key_tiles(const Parameters& p) {
    if (block_index() >= p.ordered_heads) return;
    const i64 first = static_cast<i64>(block_index()) * p.heads_together * p.seen_rows;
    const TileWord* words = reinterpret_cast<const TileWord*>(p.seen_tiles) + first * p.seen_words;
    u32* counts = p.key_counts + first;
    for (int row = thread_index(); row < p.seen_rows; row += kThreads) {
        u32 count = 0;
        for (int head = 0; head < p.heads_together; ++head) {
            const TileWord* own = words + (static_cast<i64>(head) * p.seen_rows + row) * p.seen_words;
            for (int word = 0; word < p.seen_words; ++word) count += popc(own[word].seen);
        }
        counts[row] = count;
    }
    barrier_sync();
    for (int row = thread_index(); row < p.seen_rows; row += kThreads) {
        const u32 own = counts[row];
        int before = 0;
        for (int other = 0; other < p.seen_rows; ++other) before += counts[other] > own || (counts[other] == own && other < row);
        p.key_order[first + before] = row;
    }
}

// The key tile of a head that comes after `before` others.
template <class Parameters>
__device__ __forceinline__ int ordered_key_tile(const Parameters& p, int batch, int head_kv, int before) {
    if (p.key_order == nullptr) return before;
    return static_cast<int>(p.key_order[static_cast<i64>(batch) * p.seen_batch + head_kv * p.group * p.seen_head + before]);
}
