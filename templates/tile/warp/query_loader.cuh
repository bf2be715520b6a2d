// What a block of the generic backward kernel reads of its queries, tile by tile: Q, dO, and the statistics of their rows.

// A stage of shared memory for one query tile.
template <class QueryTile, class GradientTile>
struct QueryStage {
    static constexpr int kStatisticsBytes = QueryTile::kRowCount * 4;
    static constexpr int kBytes = QueryTile::kBytes + GradientTile::kBytes + 2 * kStatisticsBytes;
    SharedAddress base;

    __device__ __forceinline__ SharedAddress q() const { return base; }
    __device__ __forceinline__ SharedAddress d_out() const { return base + QueryTile::kBytes; }
    __device__ __forceinline__ SharedAddress row_lse() const { return d_out() + GradientTile::kBytes; }
    __device__ __forceinline__ SharedAddress row_delta() const { return row_lse() + kStatisticsBytes; }
};

// Loads the tiles of all query heads that share the block's keys, one head after the other.
template <class QueryTile, class GradientTile, int kThreads, int kHeadDim, int kHeadDimV, class Sequences, class Parameters>
struct QueryLoader {
    static constexpr int kBlockQ = QueryTile::kRowCount;
    const Parameters& p;
    const Sequences& sequences;
//% if scatters
    SeenQueries next;  // the tile that comes next
    int batch, key_tile;
    int huge = 0;  // whether the tile that was loaded last has huge rows

    __device__ __forceinline__ QueryLoader(const Parameters& p, const Sequences& sequences, const SeenQueries& first, int batch,
                                           int key_tile)
        : p(p), sequences(sequences), next(first), batch(batch), key_tile(key_tile) {}

//% else
    const QueryTileRange& tiles;
    int batch, head, tile, left;  // of the tile that comes next; left: tiles
    int huge = 0;                 // whether the tile that was loaded last has huge rows

    __device__ __forceinline__ QueryLoader(const Parameters& p, const Sequences& sequences, const QueryTileRange& tiles, int batch,
                                           int head_kv)
        : p(p), sequences(sequences), tiles(tiles), batch(batch), head(head_kv * p.group), tile(tiles.begin),
          left(tiles.count() * p.group) {}

//% endif
    // The caller commits the group.
    __device__ __forceinline__ void load_next(const QueryStage<QueryTile, GradientTile>& stage) {
//% if scatters
        if (next.tile < 0) return;
        const int head = next.head, tile = next.tile;
//% else
        if (left-- <= 0) return;
//% endif
        const int first_query = tile * kBlockQ, queries = sequences.len_q(batch) - first_query;
        const i64 tile_index = sequences.first_tile(batch, head) + tile, row = tile_index * kBlockQ;
        huge = p.huge_tiles[tile_index];
        const Strides of_q{p.q_batch, p.q_head, p.q_row}, of_d_out{p.d_out_batch, p.d_out_head, p.d_out_row};
        load_tile<kThreads>(QueryTile{stage.q()}, sequences.query_row(p.q, of_q, batch, head, first_query), p.q_row, queries, kHeadDim);
        load_tile<kThreads>(GradientTile{stage.d_out()}, sequences.query_row(p.d_out, of_d_out, batch, head, first_query), p.d_out_row,
                            queries, kHeadDimV);
        const int thread = thread_index();  // row_delta lies behind row_lse
        if (thread < kBlockQ / 4) cp_async_16(stage.row_lse() + thread * 16, p.row_lse + row + thread * 4);
        else if (thread < kBlockQ / 2) cp_async_16(stage.row_lse() + thread * 16, p.row_delta + row + thread * 4 - kBlockQ);
//% if scatters and packed
        next.advance(p, (sequences.len_q(batch) + kBlockQ - 1) / kBlockQ, key_tile);  // its number in the list
//% elif scatters
        next.advance(p, batch, key_tile);
//% else
        if (++tile == tiles.end) tile = tiles.begin, ++head;
//% endif
    }
};
