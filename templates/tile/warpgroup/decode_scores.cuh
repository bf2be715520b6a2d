// What modifiers make of the scores of a consumer of the decode kernel, whose rows are of any queries and heads of a GQA group.

// Where a consumer's fragment of scores lies: as ScorePosition, for rows of which neighbours may be of different heads.
struct PackedPosition {
    static constexpr bool kRowsAreKeys = false, kTwoHeads = true, kOneHead = false;
    const int (&queries)[2];  // of a lane's rows lane/4 and lane/4 + 8
    int first_column;

    __device__ __forceinline__ int row(int, int h) const { return queries[h]; }
};

// The chain of a part's sequence and of the heads of a thread's two rows. Links count keys from the sequence's first one, which is row
// `front` of its key tiles. Where a row is not there, its query and its head stand for it that are the last ones.
template <class Traits, class Parameters>
struct DecodeScores {
    using Chain = decltype(Traits::make_chain(Parameters{}, 0));
    static constexpr int kBlockKv = Traits::kBlockKv;
    // Whether any tile may be the first one in which a row sees a key: what is in memory may hide all keys before.
//% if early
    static constexpr bool kKeysMayBeginLate = true;
//% else
    static constexpr bool kKeysMayBeginLate = false;
//% endif
    Chain chain;
    int queries[2], front;
//% if hides
    int first_tile, full_begin;  // key tiles: the first one that some rows of the tile of rows see, and that all of them see as a whole
//% endif

    __device__ __forceinline__ void begin(const Parameters& p, const PackedRows& rows, const RowTiles& tiles, int row_group, int len_kv,
                                          int front) {
        this->front = front;
#pragma unroll
        for (int h = 0; h < 2; ++h) queries[h] = rows.query(tiles, own_row(row_group, h));
//% if heads
        chain = of_heads(Traits::make_chain(p, len_kv), rows.batch, rows.head_that_is(tiles, own_row(row_group, 0)),
                         rows.head_that_is(tiles, own_row(row_group, 1)));
//% else
        chain = Traits::make_chain(p, len_kv);
//% endif
//% if hides
        first_tile = first_seen_tile<Traits>(p, rows, len_kv, front);
        full_begin = (front + chain.keys(rows.first_query + tiles.queries - 1).begin + kBlockKv - 1) / kBlockKv;
//% endif
    }
    __device__ __forceinline__ PackedPosition position(int tile) const { return {queries, tile * kBlockKv - front}; }
//% if looks

    // The first key tile that a tree mask says something of.
    __device__ __forceinline__ int first_looked_at() const { return max(0, front + chain.first_key) / kBlockKv; }
    __device__ __forceinline__ void look(int tile) { ::look<kBlockKv / 8>(chain, position(tile)); }
//% endif
//% if hides

    // Whether a row may see its first key of a tile, or of the next one of its key group.
    __device__ __forceinline__ bool may_begin_in(int tile) const { return tile < full_begin + Traits::kKeyGroups; }
    // Row of the key tiles.
    __device__ __forceinline__ int begin_of_keys(int h) const { return front + chain.keys(queries[h]).begin; }
//% endif
//% if early

    __device__ __forceinline__ void load_ahead(int tile) { ::load_ahead<kBlockKv / 8>(chain, position(tile)); }
//% endif
//% if changes

    __device__ __forceinline__ void change(float (&S)[kBlockKv / 8][4], int tile) const {
        change_scores_at_once(reinterpret_cast<float(&)[1][kBlockKv / 8][4]>(S), position(tile), chain);
    }
//% endif
};
