// A tensor of which each score has an element of 16 bits, brought to shared memory while other scores are worked on: a warp fetches what
// its next fragment needs, and reads it once the fragment is there. Where keys are no neighbours in memory, chunks of 16 bytes begin
// elsewhere, or the fragment ends within a chunk, nothing is fetched, and it is read in place.

template <class T>
struct FetchedTensor : ScoreTensor<T> {
    static constexpr bool kIsFetched = true;
    SharedAddress fetched;  // where the elements of the fragment are, or 0

    // Of one row tile, to `to`: fetched_bytes of the warp's own, at a multiple of 128. False if nothing is fetched.
    template <int kColumns, class Position>
    __device__ __forceinline__ bool fetch(SharedAddress to, const Position& position) const {
        const int end = Position::kRowsAreKeys ? position.first_row + 16 : position.first_column + kColumns;
        const u64 starts = reinterpret_cast<u64>(this->of_row[0]) | reinterpret_cast<u64>(this->of_row[Position::kTwoHeads]);
        const bool chunks = this->key_step == 1 && this->query_step % 8 == 0 && starts % 16 == 0;
//% if packed
        const int row_keys = this->row_keys;
        if (vote_sync_any(!chunks) || (end > row_keys && row_keys % 8 != 0)) return false;
//% else
        if (vote_sync_any(!chunks) || (end > this->len_kv && this->len_kv % 8 != 0)) return false;
//% endif
        barrier_warp_sync();  // all lanes have read what was there
        u32 lane = lane_index();
        launder(lane);  // else the compiler would keep addresses in registers
        const int last = this->len_q - 1;
        if constexpr (Position::kRowsAreKeys) {
            const int first_key = position.first_row + static_cast<int>(lane) % 2 * 8;
            const T* own = this->of_row[0] + first_key;
            const int query = position.first_column + static_cast<int>(lane / 2);
            const SharedAddress own_chunk = by_query(to, lane / 2, lane % 2);
#pragma unroll
//% if packed
            for (int i = 0; i < kColumns; i += 16)
                cp_async_16(own_chunk + i * 32, own + static_cast<i64>(min(query + i, last)) * this->query_step,
                            first_key < row_keys && query + i <= last);
//% else
            for (int i = 0; i < kColumns; i += 16)
                cp_async_16(own_chunk + i * 32, own + static_cast<i64>(min(query + i, last)) * this->query_step, first_key < this->len_kv);
//% endif
        } else if (Position::kOneHead && this->query_step == 0) {  // all rows are the same: the first one is enough
            const int chunk = static_cast<int>(lane), first_key = position.first_column + chunk * 8;
//% if packed
            if (chunk < kColumns / 8) cp_async_16(chunks_on(to, lane), this->of_row[0] + first_key, first_key < row_keys);
//% else
            if (chunk < kColumns / 8) cp_async_16(chunks_on(to, lane), this->of_row[0] + first_key, first_key < this->len_kv);
//% endif
        } else {
            const SharedAddress own_chunk = by_row(to, lane / 4, lane % 4);
            const int first_key = position.first_column + static_cast<int>(lane) % 4 * 8;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const i64 query = min(position.row(0, h), last);
                const T* own = this->of_row[Position::kTwoHeads * h] + query * this->query_step + first_key;
#pragma unroll
                for (int i = 0; i < kColumns; i += 32)  // a panel may have more columns
//% if packed
                    cp_async_16(chunks_on(own_chunk, i / 8) + h * 8 * 128, own + i, first_key + i < row_keys && position.row(0, h) <= last);
//% else
                    cp_async_16(chunks_on(own_chunk, i / 8) + h * 8 * 128, own + i, first_key + i < this->len_kv);
//% endif
            }
        }
        cp_async_commit_group();
        return true;
    }
    // See ScoreTensor. Of what has been fetched, if it has.
    template <class Position, int kTiles, class Change>
    __device__ __forceinline__ void for_each(float (&S)[1][kTiles][4], const Position& position, const Change& change) const {
        if (fetched == 0) return ScoreTensor<T>::for_each(S, position, change);
        cp_async_wait_group<0>();
        barrier_warp_sync();
        u32 lane = lane_index();
        launder(lane);
        const u32 row = Position::kOneHead && this->query_step == 0 ? 0 : lane % 16;
        const SharedAddress own_chunk = Position::kRowsAreKeys ? by_query(fetched, lane / 16 * 8 + lane % 8, lane / 8 % 2)
                                                               : by_row(fetched, row, lane / 16);
#pragma unroll
        for (u32 j = 0; j < kTiles; j += 2) {
            u32 pairs[4];  // of the fragment's tiles j and j + 1, each of the rows lane/4 and lane/4 + 8
            if constexpr (Position::kRowsAreKeys) ldmatrix_x4_trans(pairs, own_chunk + j * 8 * 32);
            else ldmatrix_x4(pairs, chunks_on(own_chunk, j));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const ElementPair<T> pair{pairs[i]};
                float(&own)[4] = S[0][j + i / 2];
                change(own[i % 2 * 2], pair.get(0)), change(own[i % 2 * 2 + 1], pair.get(1));
            }
        }
    }

  private:
    // Where chunks lie: permuted, so that lanes that read together find them in different banks. By row: as in a PanelTile of 16 rows, of
    // which this is one of the first four chunks; chunks_on: so many further, a multiple of 2. By query: two for each.
    __device__ __forceinline__ static SharedAddress by_row(SharedAddress first, u32 row, u32 chunk) {
        return first + row * 128 + (chunk ^ row % 8) * 16;
    }
    __device__ __forceinline__ static SharedAddress chunks_on(SharedAddress own_chunk, u32 chunks) {
        return (own_chunk ^ chunks % 8 * 16) + chunks / 8 * (16 * 128);
    }
    __device__ __forceinline__ static SharedAddress by_query(SharedAddress first, u32 query, u32 chunk) {
        return first + query * 32 + (chunk ^ query / 4 % 2) * 16;
    }
};

// Of a warp's fragment that has so many columns.
template <bool kRowsAreKeys>
__device__ __forceinline__ constexpr int fetched_bytes(int columns) {
    return kRowsAreKeys ? columns * 32 : (columns + 63) / 64 * (16 * 128);
}

template <class Link, class = void>
constexpr bool kFetches = false;
template <class Link>
constexpr bool kFetches<Link, decltype(void(Link::kIsFetched))> = true;
template <int kColumns, class Link, class Position>
__device__ __forceinline__ bool fetch_by(const Link& link, SharedAddress to, const Position& position) {
    if constexpr (kFetches<Link>) return link.template fetch<kColumns>(to, position);
    else return false;
}
// What one of the chain's links fetches for a fragment. False if it does not.
template <int kColumns, class Position, class... Links>
__device__ __forceinline__ bool fetch_scores(const ScoreChain<Links...>& chain, SharedAddress to, const Position& position) {
    return (fetch_by<kColumns>(static_cast<const Links&>(chain), to, position) || ...);
}
// The same for a block of columns and a warp's rows, from `row` of its tile on. Returns where it will be, or 0. Called once the warp has
// read what was fetched before.
template <class Position, int kColumns, class Storage, class... Links>
__device__ __forceinline__ SharedAddress fetch_block(const ScoreChain<Links...>& chain, const Storage& smem, int first_row, int row,
                                                     int block) {
    const SharedAddress to = smem.fetched_by(row / 16);
    return fetch_scores<kColumns>(chain, to, Position{first_row + row, block * kColumns}) ? to : 0;
}
template <class Link>
__device__ __forceinline__ void set_fetched_of(Link& link, SharedAddress fetched) {
    if constexpr (kFetches<Link>) link.fetched = fetched;
}
// Says where it is.
template <class... Links>
__device__ __forceinline__ void set_fetched(ScoreChain<Links...>& chain, SharedAddress fetched) {
    (set_fetched_of(static_cast<Links&>(chain), fetched), ...);
}
