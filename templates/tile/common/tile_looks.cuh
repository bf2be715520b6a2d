// The kernel `_tiles`: how much of a tile scattered masks leave (seen_tiles.cuh), by ranges of numbers, by a look at blocks, or at each
// query and key.

// Queries and keys of a tile, as far as there are any.
struct TileBounds {
    int first_query, end_query, first_key, end_key;
};

// some: whether some query may see some key; all: whether every query sees every key.
struct SeenInTile {
    bool some, all;
};

// The row of a block, of those that differ: see SeenTiles.
//% if packed
struct SeenRow {
    int row, head, batch, first_row, len_q, len_kv;  // first_row: query or key, within its sequence

    // There may be fewer tiles than rows.
    template <class Parameters>
    __device__ __forceinline__ static bool exists(const Parameters& p) {
        return block_index() % p.seen_rows < WorkList::of(p).tiles;
    }
    template <class Parameters>
    __device__ __forceinline__ static SeenRow of_block(const Parameters& p) {
        const int head = block_index() / p.seen_rows, row = block_index() - head * p.seen_rows;
        const PackedTile tile = WorkList::of(p).tile(row);
        return {row, head, tile.batch, tile.first_row, tile.rows.len_q, tile.rows.len_kv};
    }
};

//% else
struct SeenRow {
    int row, head, batch, word;  // word: of the row, which the block writes

    template <class Parameters>
    __device__ __forceinline__ static SeenRow of_block(const Parameters& p) {
        const int rows = block_index() / p.seen_words, of_heads = rows / p.seen_rows, batch = of_heads / p.seen_heads;
        return {rows - of_heads * p.seen_rows, of_heads - batch * p.seen_heads, batch, block_index() - rows * p.seen_words};
    }
};

//% endif
// The lowest and the highest of some numbers.
struct ValueRange {
    i64 lowest, highest;
};

// Of value(i) for i from `begin` to `end` - 1, by a warp.
template <class Value>
__device__ __forceinline__ ValueRange range_over(int begin, int end, const Value& value) {
    constexpr i64 kHighest = 0x7fffffffffffffffll;
    ValueRange found{kHighest, -kHighest - 1};
    for (int i = begin + lane_index(); i < end; i += 32) {
        const i64 own = value(i);
        found = {min(found.lowest, own), max(found.highest, own)};
    }
    auto of_lane = [](i64 own, int distance) {
        const u32 low = shfl_sync_bfly(static_cast<u32>(own), distance), high = shfl_sync_bfly(static_cast<u32>(own >> 32), distance);
        return static_cast<i64>(static_cast<u64>(high) << 32 | low);
    };
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const i64 lowest = of_lane(found.lowest, distance), highest = of_lane(found.highest, distance);
        found = {min(found.lowest, lowest), max(found.highest, highest)};
    }
    return found;
}

// Comparisons of numbers of two ranges, where all pairs of them may occur.
__device__ __forceinline__ SeenInTile is_at_most(const ValueRange& a, const ValueRange& b) {
    return {a.lowest <= b.highest, a.highest <= b.lowest};
}
__device__ __forceinline__ SeenInTile is_below(const ValueRange& a, const ValueRange& b) {
    return {a.lowest < b.highest, a.highest < b.lowest};
}
__device__ __forceinline__ SeenInTile is_equal(const ValueRange& a, const ValueRange& b) {
    const bool some = a.lowest <= b.highest && b.lowest <= a.highest;
    return {some, some && a.lowest == a.highest && b.lowest == b.highest};
}

// What conditions on the same tile come to, as far as that is known: `some` may be true, and `all` false, where a look would tell more.
__device__ __forceinline__ SeenInTile both(const SeenInTile& a, const SeenInTile& b) { return {a.some && b.some, a.all && b.all}; }
__device__ __forceinline__ SeenInTile either(const SeenInTile& a, const SeenInTile& b) { return {a.some || b.some, a.all || b.all}; }
__device__ __forceinline__ SeenInTile opposite(const SeenInTile& a) { return {!a.all, !a.some}; }
constexpr SeenInTile kUnknown{true, false};

// Of what is the same in blocks of so many queries and keys, which begin at multiples of that.
constexpr int kWholeTile = 0x40000000;
__device__ __forceinline__ int block_of(i64 divisor) { return divisor < 1 || divisor > kWholeTile ? 1 : static_cast<int>(divisor); }
template <class Visible>
__device__ __forceinline__ SeenInTile seen_blocks(const TileBounds& tile, int block_q, int block_kv, const Visible& visible) {
    const int first_q = tile.first_query / block_q, first_kv = tile.first_key / block_kv;
    const int queries = (tile.end_query - 1) / block_q - first_q + 1, keys = (tile.end_key - 1) / block_kv - first_kv + 1;
    bool some = false, all = true;
    for (int i = lane_index(); i < queries * keys; i += 32) {
        const int query = max(tile.first_query, (first_q + i / keys) * block_q);
        const bool own = visible(query, max(tile.first_key, (first_kv + i % keys) * block_kv));
        some |= own, all &= own;
    }
    return {vote_sync_any(some), !vote_sync_any(!all)};
}

// By a look at each query and key of a tile.
template <class Link>
__device__ __forceinline__ SeenInTile look_at(const Link& link, const TileBounds& tile) {
    bool some = false, all = true;
#pragma unroll 1
    for (int query = tile.first_query; query < tile.end_query; ++query) {
#pragma unroll 1
        for (int first = tile.first_key; first < tile.end_key; first += 32) {
            const int key = first + lane_index();
            if (key < tile.end_key) {
                const bool visible = link.visible(query, key);
                some |= visible, all &= visible;
            }
            if (vote_sync_any(some) && vote_sync_any(!all)) return {true, false};
        }
    }
    return {vote_sync_any(some), !vote_sync_any(!all)};
}

template <class Link>
__device__ __forceinline__ void join_seen(SeenInTile& seen, const Link& link, const TileBounds& tile) {
    if constexpr (kIsScattered<Link>) seen = both(seen, link.seen_in(tile));
}
template <class... Links>
__device__ __forceinline__ SeenInTile seen_in_tile(const ScoreChain<Links...>& chain, const TileBounds& tile) {
    SeenInTile seen{true, true};
    (join_seen(seen, static_cast<const Links&>(chain), tile), ...);
    return seen;
}

//% if packed
// Writes the words of a row: a warp looks at a tile. kInRange: tiles count as seen that the chain has in its ranges, as additions to dQ
// that have an order count on all of them (semaphore.cuh).
//% else
// Writes a word of a row: a warp looks at a tile. kInRange: tiles count as seen that the chain has in its ranges, as additions to dQ that
// have an order count on all of them (semaphore.cuh).
//% endif
template <int kThreads, int kQueries, int kKeys, bool kRowsAreKeys, bool kInRange, class Parameters, class Chain>
__device__ __forceinline__ void find_seen_tiles(const Parameters& p, const SeenRow& own, const Chain& chain) {
    SharedRegions regions;
    const SharedAddress flags = regions.take(32 * 4);  // of the tiles of a word: 1 for seen, 2 for hidden
    const int warp = warp_index(), lane = lane_index();
//% if packed
    const i64 row = static_cast<i64>(own.head) * p.seen_rows + own.row;
    const int words = SeenTiles::words_for(kRowsAreKeys ? (own.len_q + kQueries - 1) / kQueries : (own.len_kv + kKeys - 1) / kKeys);
//% else
    const i64 row = (static_cast<i64>(own.batch) * p.seen_heads + own.head) * p.seen_rows + own.row;
//% endif
    int begin, end;
    if constexpr (kRowsAreKeys) {
//% if packed
        const auto range = chain.template query_tiles<kQueries>(own.first_row, own.first_row + kKeys, own.len_q);
//% else
        const auto range = chain.template query_tiles<kQueries>(own.row * kKeys, own.row * kKeys + kKeys, p.len_q);
//% endif
        begin = range.begin, end = range.end;
    } else {
//% if packed
        const auto range = chain.template key_tiles<kQueries, kKeys>(own.first_row);
//% else
        const auto range = chain.template key_tiles<kQueries, kKeys>(own.row * kQueries);
//% endif
        begin = range.begin, end = range.end;
    }
//% if packed
#pragma unroll 1
    for (int word = 0; word < words; ++word) {
//% else
    {
        const int word = own.word;
//% endif
#pragma unroll 1
        for (int i = warp; i < 32; i += kThreads / 32) {
            const int column = word * 32 + i;
            SeenInTile seen{false, false};
            if (begin <= column && column < end) {
//% if packed
                const int first_query = kRowsAreKeys ? column * kQueries : own.first_row;
                const int first_key = kRowsAreKeys ? own.first_row : column * kKeys;
                const int end_query = min(first_query + kQueries, own.len_q), end_key = min(first_key + kKeys, own.len_kv);
//% else
                const int first_query = (kRowsAreKeys ? column : own.row) * kQueries, first_key = (kRowsAreKeys ? own.row : column) * kKeys;
                const int end_query = min(first_query + kQueries, p.len_q), end_key = min(first_key + kKeys, p.len_kv);
//% endif
                seen = seen_in_tile(chain, {first_query, end_query, first_key, end_key});
                if (kInRange) seen.some = true;
            }
            if (lane == 0) store_shared(flags + i * 4, (seen.some ? 1 : 0) | (seen.all ? 0 : 2));
        }
        barrier_sync();
        if (warp == 0) {
            const u32 flag = load_shared(flags + lane * 4);
            const u32 seen = vote_sync_ballot((flag & 1) != 0), hidden = vote_sync_ballot((flag & 2) != 0);
            u32* to = p.seen_tiles + (row * p.seen_words + word) * 2;
            if (lane < 2) to[lane] = lane == 0 ? seen : hidden;
        }
//% if packed
        barrier_sync();  // nobody reads the flags any more
//% endif
    }
}
