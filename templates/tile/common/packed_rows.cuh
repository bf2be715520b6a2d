// PackGQA for groups of any size and few queries: rows of different query heads and queries that meet the same keys, so that these are
// read once.

// A row tile of a GQA group: `heads` query heads next to each other for each of `queries` queries. A group has several tiles, its sets of
// heads times its query tiles, where all of its rows would not fit. The last set and the last query tile may have rows that are not there.
struct RowTiles {
    int heads, queries;
    int head_sets, row_tiles;  // of a group: sets of heads, tiles
    u64 heads_reciprocal, head_sets_reciprocal, row_tiles_reciprocal;

    template <class Parameters>
    __device__ __forceinline__ static RowTiles of(const Parameters& p) {
        return {p.tile_heads,           p.tile_queries, p.head_sets, p.row_tiles, p.tile_heads_reciprocal, p.head_sets_reciprocal,
                p.row_tiles_reciprocal};
    }
    __device__ __forceinline__ int rows() const { return heads * queries; }
};

// One of them. `first_head` is a query head, of all.
struct PackedRows {
    int batch, head_kv, first_head, end_head, first_query;

    // `head` counts all row tiles of a sequence, those of a key/value head one after the other.
    __device__ __forceinline__ static PackedRows find(const RowTiles& tiles, int group, int batch, int head) {
        const int head_kv = divide(head, tiles.row_tiles_reciprocal), tile = head - head_kv * tiles.row_tiles;
        const int query_tile = divide(tile, tiles.head_sets_reciprocal), head_set = tile - query_tile * tiles.head_sets;
        return {batch, head_kv, head_kv * group + head_set * tiles.heads, head_kv * group + group, query_tile * tiles.queries};
    }
    __device__ __forceinline__ int query(const RowTiles& tiles, int row) const { return first_query + divide(row, tiles.heads_reciprocal); }
    __device__ __forceinline__ int head(const RowTiles& tiles, int row) const {
        return first_head + row - divide(row, tiles.heads_reciprocal) * tiles.heads;
    }
//% if heads or joins
    // The same, or the last one where the row is not there.
    __device__ __forceinline__ int head_that_is(const RowTiles& tiles, int row) const { return min(head(tiles, row), end_head - 1); }
//% endif
    // Whether there is such a row.
    __device__ __forceinline__ bool has(const RowTiles& tiles, int row, int len_q) const {
        return row < tiles.rows() && query(tiles, row) < len_q && head(tiles, row) < end_head;
    }
};
