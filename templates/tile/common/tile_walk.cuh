// Where a block is on its way over query tiles, if several query heads share its keys: a tile of each of them, then the next tile. With one
// query head it walks forwards. A block here is one that has the work tile; a persistent one begins and ends many.
//
// What an L2 group reads and adds to fits into the L2 only while its blocks are at the same tile. Under a causal mask a block begins
// together with others of the first group, and walks backwards, from the last tile. A block with few tiles ends early, and then one of the
// second group begins, at its own first tile: that is the one which the blocks of the second group before it have come to. So all of them
// end together, and the third group begins as the first did.

struct TileWalk {
    int tile, member, left;  // member: number among the query heads of a key/value head; left: of tiles, in all
    int direction;           // from tile to tile: 1, or -1 backwards
    i64 index;               // the tile's place among those of all heads: [batch, heads_q, query_tiles]

    template <class Parameters>
    __device__ __forceinline__ TileWalk(const KeyWork& work, const Parameters& p)
        : member(0), left(work.tiles.count() * p.group), direction(walks_backwards(work, p) ? -1 : 1) {
        tile = direction > 0 ? work.tiles.begin : work.tiles.end - 1;
//% if packed
        index = static_cast<i64>(head(work, p)) * p.query_tiles + work.first_tile + tile;
//% else
        index = (static_cast<i64>(work.batch) * p.heads_q + head(work, p)) * p.query_tiles + tile;
//% endif
    }

    template <class Parameters>
    __device__ __forceinline__ int head(const KeyWork& work, const Parameters& p) const {
        return work.head_kv * p.group + member;
    }
    template <class Parameters>
    __device__ __forceinline__ void advance(const KeyWork&, const Parameters& p) {
        --left, ++member, index += p.query_tiles;
        if (member == p.group) member = 0, tile += direction, index += direction - p.group * p.query_tiles;
    }

  private:
    template <class Parameters>
    __device__ __forceinline__ static bool walks_backwards(const KeyWork& work, const Parameters& p) {
//% if packed
        return p.group > 1 && divide(work.head_kv, p.l2_group_heads_reciprocal) % 2 == 0;
//% else
        return p.group > 1 && divide(work.batch * p.heads_kv + work.head_kv, p.l2_group_heads_reciprocal) % 2 == 0;
//% endif
    }
};
