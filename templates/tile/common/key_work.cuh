// A work tile of a backward pass: a key tile of a key/value head, and the query tiles that see any of its keys, those of all
// `group` query heads that share it. The block that has it owns dK and dV of its keys.

struct KeyWork {
    int first_key, head_kv, batch;  // first_key: -1 where there is no work tile (WorkClaims)
//% if packed
    SequenceRows rows;   // of its sequence, which counts as an entry of the batch
    int first_tile;      // of the sequence, among a head's query tiles: see packed_gradients.cuh
//% endif
//% if scatters and packed
    int key_tile, query_tiles;  // number of the key tile in the list; query tiles of the sequence
//% elif scatters
    int key_tile;
//% endif
    QueryTileRange tiles;  // of each query head

    // Under a causal mask the first key tiles see the most queries: they come first, as the last query tiles do in the forward pass. But
    // where additions to dQ have an order the last ones do, because they add first.
//% if packed
    // Which come first the list says. make_chain(len_q, len_kv, batch): the chain of a sequence. p.query_tiles is the distance of heads.
    template <int kBlockQ, int kBlockKv, class MakeChain, class Parameters>
    __device__ __forceinline__ static KeyWork find(const Parameters& p, const WorkList& list, const MakeChain& make_chain,
                                                   int index = block_index()) {
        const WorkTile work = find_work_tile(index, list.scheduler(p), p.heads_kv, p.heads_kv_reciprocal);
        const PackedTile tile = list.tile(work.tile);
//% if scatters
        const int query_tiles = (tile.rows.len_q + kBlockQ - 1) / kBlockQ;
        return {tile.first_row, work.head, tile.batch, tile.rows, tile.rows.first_q / kBlockQ + tile.batch, work.tile, query_tiles, {}};
//% else
        const auto chain = make_chain(tile.rows.len_q, tile.rows.len_kv, tile.batch);
        const int first_key = tile.first_row;
        return {first_key, work.head, tile.batch, tile.rows, tile.rows.first_q / kBlockQ + tile.batch,
                chain.template query_tiles<kBlockQ>(first_key, first_key + kBlockKv, tile.rows.len_q)};
//% endif
    }
//% else
    template <int kBlockQ, int kBlockKv, bool kLastFirst, class Chain, class Parameters>
    __device__ __forceinline__ static KeyWork find(const Parameters& p, const Chain& chain, int index = block_index()) {
//% if tensors
        // A head of all entries of the batch, and then the next one: they may share what each score has in memory, and its gradient.
        const WorkTile turned = find_work_tile(index, TileScheduler::of(p, p.key_tiles), p.batches, p.batches_reciprocal);
        const WorkTile work{turned.tile, turned.batch, turned.head};
//% else
        const WorkTile work = find_work_tile(index, TileScheduler::of(p, p.key_tiles), p.heads_kv, p.heads_kv_reciprocal);
//% endif
//% if scatters
        int key_tile = work.tile;
        if constexpr (!kLastFirst) key_tile = ordered_key_tile(p, work.batch, work.head, p.key_tiles - 1 - work.tile);
        return {key_tile * kBlockKv, work.head, work.batch, key_tile, {}};  // its tiles are found one by one
//% else
        const int first_key = (kLastFirst ? work.tile : p.key_tiles - 1 - work.tile) * kBlockKv;
//% if opens
        const Chain own = of_batch(chain, work.batch);
        return {first_key, work.head, work.batch, own.template query_tiles<kBlockQ>(first_key, first_key + kBlockKv, p.len_q)};
//% else
//% if far
        KeyWork found{first_key, work.head, work.batch, chain.template query_tiles<kBlockQ>(first_key, first_key + kBlockKv, p.len_q)};
        if (p.last_queries == nullptr) return found;
        const int last = p.last_queries[(static_cast<i64>(work.batch) * p.heads_kv + work.head) * p.key_tiles + first_key / kBlockKv];
        found.tiles.end = min(found.tiles.end, (last + kBlockQ) / kBlockQ);  // the tile of the last query is the last one
        return found;
//% else
        return {first_key, work.head, work.batch, chain.template query_tiles<kBlockQ>(first_key, first_key + kBlockKv, p.len_q)};
//% endif
//% endif
//% endif
    }
//% endif
};

//% if scatters
// Where a block is on its way over query tiles that see some of its keys: one query head after the other. left: 0 behind the last one.
struct HeadWalk {
    SeenQueries seen;
    int current_head, tile, left;
    bool hides;  // whether some query of the tile does not see some key
    i64 index;   // the tile's place among those of all heads: [batch, heads_q, query_tiles]

    template <class Parameters>
    __device__ __forceinline__ HeadWalk(const KeyWork& work, const Parameters& p)
//% if packed
        : seen(p, work.query_tiles, work.head_kv, work.key_tile) {
//% else
        : seen(p, work.batch, work.head_kv, work.key_tile) {
//% endif
        find(work, p);
    }
    template <class Parameters>
    __device__ __forceinline__ int head(const KeyWork&, const Parameters&) const {
        return current_head;
    }
    template <class Parameters>
    __device__ __forceinline__ void advance(const KeyWork& work, const Parameters& p) {
//% if packed
        seen.advance(p, work.query_tiles, work.key_tile);
//% else
        seen.advance(p, work.batch, work.key_tile);
//% endif
        find(work, p);
    }
    // What one who walks tells others of the tile, in 8 bytes of shared memory, and how they go on by that: left is then 1 at the last one.
    __device__ __forceinline__ void store(SharedAddress words, bool is_last) const {
        store_shared(words, tile * 4 + hides * 2 + is_last);
        store_shared(words + 4, current_head);
    }
    template <class Parameters>
    __device__ __forceinline__ void load(SharedAddress words, const KeyWork& work, const Parameters& p) {
        const u32 found = load_shared(words);
        current_head = load_shared(words + 4);
        hides = found & 2, left = found & 1 ? 1 : 2;
        go_to(found / 4, work, p);
    }

  private:
    template <class Parameters>
    __device__ __forceinline__ void find(const KeyWork& work, const Parameters& p) {
        left = seen.tile >= 0, hides = left > 0 && seen.hides(), current_head = seen.head;
        go_to(seen.tile, work, p);
    }
    template <class Parameters>
    __device__ __forceinline__ void go_to(int next_tile, const KeyWork& work, const Parameters& p) {
        tile = next_tile;
//% if packed
        index = static_cast<i64>(current_head) * p.query_tiles + work.first_tile + tile;
//% else
        index = (static_cast<i64>(work.batch) * p.heads_q + current_head) * p.query_tiles + tile;
//% endif
    }
};
//% else
// Where a block is on its way over query tiles: one query head after the other, `left` tiles in all.
struct HeadWalk {
    int current_head, tile, left;
    i64 index;  // the tile's place among those of all heads: [batch, heads_q, query_tiles]

    template <class Parameters>
    __device__ __forceinline__ HeadWalk(const KeyWork& work, const Parameters& p)
        : current_head(work.head_kv * p.group), tile(work.tiles.begin), left(work.tiles.count() * p.group),
//% if packed
          index(static_cast<i64>(current_head) * p.query_tiles + work.first_tile + tile) {}

//% else
          index((static_cast<i64>(work.batch) * p.heads_q + current_head) * p.query_tiles + tile) {}

//% endif
    template <class Parameters>
    __device__ __forceinline__ int head(const KeyWork&, const Parameters&) const {
        return current_head;
    }
    template <class Parameters>
    __device__ __forceinline__ void advance(const KeyWork& work, const Parameters& p) {
        --left, ++tile, ++index;
        if (tile == work.tiles.end) tile = work.tiles.begin, ++current_head, index += p.query_tiles - work.tiles.count();
    }
};
//% endif
