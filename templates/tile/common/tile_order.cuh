// The kernel `_order`, behind `_tiles`: which row of tiles is the longest, so that it is handed out first.

// Writes the rows of a head, or of all heads that have the same, by the number of tiles that are seen: the one with the fewest first, and
// rows of as many in their order. rows: at most kMost, words each.
template <int kThreads, int kMost>
__device__ __forceinline__ void order_rows(u32* by_length, const TileWord* of_rows, int rows, int words) {
    SharedRegions regions;
    const SharedAddress counts = regions.take(kMost * 4);
    const int thread = thread_index();
    for (int row = thread; row < rows; row += kThreads) {
        u32 count = 0;
        for (int word = 0; word < words; ++word)
            for (u32 seen = of_rows[static_cast<i64>(row) * words + word].seen; seen != 0; seen &= seen - 1) ++count;
        store_shared(counts + row * 4, count);
    }
    barrier_sync();
    for (int row = thread; row < rows; row += kThreads) {
        const u32 own = load_shared(counts + row * 4);
        int shorter = 0;
        for (int other = 0; other < rows; ++other) {
            const u32 count = load_shared(counts + other * 4);
            shorter += count < own || (count == own && other < row);
        }
        by_length[shorter] = row;
    }
}
