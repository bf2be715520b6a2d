// Packed sequences, of any lengths, one behind the other along an axis of tokens: where that of a work tile lies, and the list of query
// tiles, which the kernel `_sequences` writes before other kernels read it (packed_work.cuh).

// In a tensor map of a packed tensor two dimensions stand in place of the batch, so that a copy ends where its sequence does: their
// strides and that of the rows lead around all of memory (codegen/packed.py). Row i of a sequence has the coordinates kMapRows - length + i
// among the rows, of which the map has kMapRows, and then (head, token behind the sequence, kMapRows).
constexpr int kMapRows = 1 << 30;

// Where the tokens of a sequence are, of which all are used: its first rows in q and in k and v, and how many there are.
struct SequenceRows {
    int first_q, len_q, first_kv, len_kv;

    __device__ __forceinline__ static SequenceRows of(const uint4& v) {
        return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), static_cast<int>(v.w)};
    }
    __device__ __forceinline__ uint4 vector() const {
        return {static_cast<u32>(first_q), static_cast<u32>(len_q), static_cast<u32>(first_kv), static_cast<u32>(len_kv)};
    }
    // Coordinates 1 and 3 of tensor copies. Rows from the length on are outside of the map.
    __device__ __forceinline__ int query_coordinate(int query) const { return kMapRows - len_q + query; }
    __device__ __forceinline__ int key_coordinate(int key) const { return kMapRows - len_kv + key; }
    __device__ __forceinline__ int end_q() const { return first_q + len_q; }
    __device__ __forceinline__ int end_kv() const { return first_kv + len_kv; }
};

// One of packed sequences, for which this has the functions of DenseSequences.
struct PackedSequences {
    SequenceRows rows;
    int tokens_q;  // of the packed tensors

    __device__ __forceinline__ int len_q(int) const { return rows.len_q; }
    __device__ __forceinline__ int len_kv(int) const { return rows.len_kv; }

    template <class Element>
    __device__ __forceinline__ Element* query_row(Element* tensor, const Strides& strides, int, int head, int row) const {
        return tensor + head * strides.head + (rows.first_q + row) * strides.row;
    }
    template <class Element>
    __device__ __forceinline__ Element* key_row(Element* tensor, const Strides& strides, int, int head, int row) const {
        return tensor + head * strides.head + (rows.first_kv + row) * strides.row;
    }
    // In [heads_q, tokens_q].
    __device__ __forceinline__ i64 lse_offset(int, int head) const { return static_cast<i64>(head) * tokens_q + rows.first_q; }
};

// A tile of a head, whatever the head: its sequence, and its first row within that, of queries or of keys.
struct PackedTile {
    int batch, first_row;
    SequenceRows rows;

    __device__ __forceinline__ static PackedTile of(const uint4& own, const uint4& rows) {
        return {static_cast<int>(own.x), static_cast<int>(own.y), SequenceRows::of(rows)};
    }
};

// A list of tiles. Which come last are handed out first (TileScheduler): those of the longest sequence, its last queries at the
// very end.
struct WorkList {
    static constexpr int kTileWords = 8;
    u32* words;                     // of the number of tiles and of claims, and then of each tile
    int tiles;                      // their number
    u64 l2_group_tiles_reciprocal;  // for a division by the work tiles of an L2 group, see divide

    template <class Parameters>
    __device__ __forceinline__ static WorkList of(const Parameters& p) {
        return at(p.work_list);
    }
    __device__ __forceinline__ static WorkList at(u32* words) {
        const uint4 head = *reinterpret_cast<const uint4*>(words);
        return {words, static_cast<int>(head.x), head.z | static_cast<u64>(head.w) << 32};
    }
    // Claims of work tiles so far, of kernels that hand them out one after the other: 0 when these begin.
    template <class Parameters>
    __device__ __forceinline__ static u32* claims(const Parameters& p) { return p.work_list + kTileWords / 2; }
    __device__ __forceinline__ void store_length() const {
        const u32 low = static_cast<u32>(l2_group_tiles_reciprocal), high = static_cast<u32>(l2_group_tiles_reciprocal >> 32);
        uint4* at = reinterpret_cast<uint4*>(words);
        at[0] = {static_cast<u32>(tiles), 0, low, high}, at[1] = {0, 0, 0, 0};
    }
    __device__ __forceinline__ uint4* tile_words(int index) const {
        return reinterpret_cast<uint4*>(words + (static_cast<i64>(index) + 1) * kTileWords);
    }
    __device__ __forceinline__ PackedTile tile(int index) const {
        const uint4* at = tile_words(index);
        return PackedTile::of(at[0], at[1]);
    }
    // Begins to copy the words of `PackedTile::of`, as a group of this thread's copies.
    __device__ __forceinline__ void fetch_tile(int index, SharedAddress to) const {
        const uint4* at = tile_words(index);
        cp_async_16(to, at);
        cp_async_16(to + 16, at + 1);
        cp_async_commit_group();
    }
    __device__ __forceinline__ void store_tile(int index, const PackedTile& tile) const {
        uint4* at = tile_words(index);
//% if scatters
        at[0] = {static_cast<u32>(tile.batch), static_cast<u32>(tile.first_row), static_cast<u32>(index), 0};
//% else
        at[0] = {static_cast<u32>(tile.batch), static_cast<u32>(tile.first_row), 0, 0};
//% endif
        at[1] = tile.rows.vector();
    }
    // For find_work_tile, where all sequences are one entry of a batch.
    template <class Parameters>
    __device__ __forceinline__ TileScheduler scheduler(const Parameters& p) const {
        return {tiles, p.l2_group_heads, p.l2_group_heads * tiles, p.l2_group_heads_reciprocal, l2_group_tiles_reciprocal};
    }
};
