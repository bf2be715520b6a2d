// Scattered masks, which hide keys of no range: as of documents, or of a mask_mod. The kernel `_tiles` finds which tiles they leave, and
// the kernels behind it visit these alone, and mask those of which something is hidden.
//
// A link of the chain that is such a mask (kScatters) has `visible`, `hide`, of a fragment, and `seen_in`, of a tile, which all lanes of a
// warp call together.

// S = -inf where scattered masks hide a key from a query.
template <class Link, class Position, int kRowTiles, int kTiles>
__device__ __forceinline__ void hide_by(const Link& link, float (&S)[kRowTiles][kTiles][4], const Position& position) {
    if constexpr (kIsScattered<Link>) link.hide(S, position);
}
template <class Position, int kRowTiles, int kTiles, class... Links>
__device__ __forceinline__ void hide_scattered(float (&S)[kRowTiles][kTiles][4], const Position& position,
                                               const ScoreChain<Links...>& chain) {
    (hide_by(static_cast<const Links&>(chain), S, position), ...);
}

// What the kernel `_tiles` writes of 32 tiles of a row, a bit for each: whether some query may see some key, and whether some query does
// not see some key. Tiles beyond the ranges of the chain count as not seen.
struct TileWord {
    u32 seen, hidden;
};

// A row of tiles: the key tiles of a query tile, or in the backward pass the query tiles of a key tile. Rows are the same for all heads, or
// all entries of the batch, where masks do not depend on these.
struct SeenTiles {
    const TileWord* words;
    int count;  // of words

//% if packed
    // row: number of the tile in the list of tiles, whichever its sequence is; across: tiles in its row
    template <class Parameters>
    __device__ __forceinline__ static SeenTiles of(const Parameters& p, int across, int head, int row) {
        const i64 index = static_cast<i64>(head) * p.seen_head + row;
        return {reinterpret_cast<const TileWord*>(p.seen_tiles) + index * p.seen_words, words_for(across)};
    }
    // A row without tiles has a word, too: kernels visit a tile that nobody sees, so that they write zeros.
    __device__ __forceinline__ static int words_for(int across) { return max(1, (across + 31) >> 5); }
//% else
    template <class Parameters>
    __device__ __forceinline__ static SeenTiles of(const Parameters& p, int batch, int head, int row) {
        const i64 index = static_cast<i64>(batch) * p.seen_batch + head * p.seen_head + row;
        return {reinterpret_cast<const TileWord*>(p.seen_tiles) + index * p.seen_words, p.seen_words};
    }
//% endif
    __device__ __forceinline__ bool hides(int tile) const { return words[tile >> 5].hidden >> (tile & 31) & 1; }
    // The last tile before `tile` that is seen; -1: none.
    __device__ __forceinline__ int before(int tile) const {
        int word = (tile - 1) >> 5;
        if (word < 0) return -1;
        u32 seen = words[word].seen & 0xffffffffu >> (31 - ((tile - 1) & 31));
        while (seen == 0 && --word >= 0) seen = words[word].seen;
        return seen == 0 ? -1 : word * 32 + 31 - leading_zeros(seen);
    }
    // The first tile from `tile` on that is seen; -1: none.
    __device__ __forceinline__ int from(int tile) const {
        int word = tile >> 5;
        if (word >= count) return -1;
        u32 seen = words[word].seen & 0xffffffffu << (tile & 31);
        while (seen == 0 && ++word < count) seen = words[word].seen;
        return seen == 0 ? -1 : word * 32 + trailing_zeros(seen);
    }
};

// A walk over the query tiles that see keys of a key tile: of one query head of a key/value head after the other.
//% if packed
// In place of `batch` and `key_tile` are the query tiles of the sequence, and the number of the key tile in the list: see SeenTiles::of.
//% endif
struct SeenQueries {
    SeenTiles tiles;
    int head, end_head, tile;  // tile: -1 behind the last one

    template <class Parameters>
    __device__ __forceinline__ SeenQueries(const Parameters& p, int batch, int head_kv, int key_tile)
        : tiles(SeenTiles::of(p, batch, head_kv * p.group, key_tile)), head(head_kv * p.group), end_head(head + p.group),
          tile(tiles.from(0)) {
        find_head(p, batch, key_tile);
    }
    template <class Parameters>
    __device__ __forceinline__ void advance(const Parameters& p, int batch, int key_tile) {
        tile = tiles.from(tile + 1);
        find_head(p, batch, key_tile);
    }
    __device__ __forceinline__ bool hides() const { return tiles.hides(tile); }

  private:
    // Where a head has no tile left, the next one that has some.
    template <class Parameters>
    __device__ __forceinline__ void find_head(const Parameters& p, int batch, int key_tile) {
        while (tile < 0 && ++head < end_head) {
            tiles = SeenTiles::of(p, batch, head, key_tile);
            tile = tiles.from(0);
        }
    }
};
