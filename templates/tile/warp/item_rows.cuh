// PackGQA where the group of query heads that share keys is known at launch: row r of a key/value head's queries is query r / group of the
// group's head r % group. A work item has kRows of these rows, the last one of a key/value head maybe fewer.

struct PackedRow {
    int query, head;
};

template <int kRows, class Parameters>
struct ItemRows {
    const Parameters& p;
    int batch, head_kv, first_row, rows;  // rows: that there are

    __device__ __forceinline__ ItemRows(const Parameters& p, const HeadTiles& item)
        : p(p), batch(item.batch), head_kv(divide(item.head, p.row_tiles_reciprocal)),
          first_row((item.head - head_kv * p.row_tiles) * kRows), rows(min(kRows, p.len_q * p.group - first_row)) {}

    __device__ __forceinline__ int query(int row) const { return divide(first_row + row, p.group_reciprocal); }
    __device__ __forceinline__ PackedRow at(int row) const {
        const int of_row = query(row);
        return {of_row, head_kv * p.group + first_row + row - of_row * p.group};
    }

    // Some row sees keys of the key tiles [begin, end), all rows see those of [full_begin, full_end).
    template <int kBlockKv, class Chain>
    __device__ __forceinline__ KeyTileRange<Chain::kHidesFirstKeys> key_tiles(const Chain& chain) const {
        const KeyRange of_first = chain.keys(query(0)), of_last = chain.keys(query(rows - 1));
//% if opens
        const int begin = chain.prefix > 0 ? 0 : of_first.begin;  // what lies between a prefix and other keys is visited, too
        return {begin / kBlockKv, (of_last.begin + kBlockKv - 1) / kBlockKv, max(0, of_first.end) / kBlockKv,
                (max(0, of_last.end) + kBlockKv - 1) / kBlockKv};
//% else
        return {of_first.begin / kBlockKv, (of_last.begin + kBlockKv - 1) / kBlockKv, max(0, of_first.end) / kBlockKv,
                (max(0, of_last.end) + kBlockKv - 1) / kBlockKv};
//% endif
    }

    // Copies Q to shared memory; it is 0 where there is no row or column. All threads of the block take part.
    template <int kThreads, int kColumnsValid, class Element, class Tile, class Sequences>
    __device__ __forceinline__ void load_queries(const Tile& tile, const Element* q, const Strides& strides,
                                                 const Sequences& sequences) const {
        for (int n = thread_index(); n < kRows * Tile::kChunks; n += kThreads) {
            const int row = n / Tile::kChunks, chunk = n % Tile::kChunks;
            uint4 loaded{0, 0, 0, 0};
            if (row < rows && chunk * 8 < kColumnsValid) {
                const PackedRow from = at(row);
                loaded = *reinterpret_cast<const uint4*>(sequences.query_row(q, strides, batch, from.head, from.query) + chunk * 8);
            }
            store_shared_v4(tile.at(row, chunk), loaded);
        }
    }

    // S = -inf where the chain hides a key from a row. `first` is the warp's first row, `first_key` the key of its first column.
    template <class Chain, int kRowTiles, int kKeyTiles>
    __device__ __forceinline__ void mask(float (&S)[kRowTiles][kKeyTiles][4], int first, int first_key, const Chain& chain) const {
        const int lane = lane_index();
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const KeyRange seen = chain.keys(query(first + i * 16 + h * 8 + lane / 4));
#pragma unroll
                for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int key = first_key + j * 8 + lane % 4 * 2 + e;
//% if opens
                        const bool is_before = Chain::kHidesFirstKeys && key < seen.begin && key >= chain.prefix;
                        if (key >= seen.end || is_before) S[i][j][h * 2 + e] = -infinity();
//% else
                        if (key >= seen.end || (Chain::kHidesFirstKeys && key < seen.begin)) S[i][j][h * 2 + e] = -infinity();
//% endif
                    }
            }
    }
};

// Where a warp's fragment of scores lies: as ScorePosition, for rows of which neighbours may be of different heads.
template <class Rows>
struct ItemPosition {
    static constexpr bool kRowsAreKeys = false, kTwoHeads = true, kOneHead = false;
    const Rows& rows;
    int first_row, first_column;

    __device__ __forceinline__ int row(int i, int h) const { return rows.query(first_row + i * 16 + h * 8 + lane_index() / 4); }
    __device__ __forceinline__ int first_row_of_warp() const { return rows.query(first_row); }
    template <int kRowTiles>
    __device__ __forceinline__ int last_row_of_warp() const {
        return rows.query(first_row + kRowTiles * 16 - 1);
    }
};

// The chain for the heads of a lane's rows lane/4 and lane/4 + 8 of a warp's 16 from `first_row` on.
template <class Chain, class Rows>
__device__ __forceinline__ Chain of_item_heads(const Chain& chain, const Rows& rows, int first_row) {
    const int row = first_row + lane_index() / 4;
    return of_heads(chain, rows.batch, rows.at(row).head, rows.at(row + 8).head);
}
