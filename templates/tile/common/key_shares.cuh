// Equal shares of keys: which key tiles a thread block works on where few queries meet many keys, so that heads alone would not keep all
// SMs busy ("split-K": flash decoding).
//
// The key tiles of all heads are numbered: those of a head in all sequences, one sequence after the other, before those of the next head.
// Block b of P has the tiles [b * tiles / P, (b + 1) * tiles / P): one piece, which begins and ends anywhere in a head. What a block does
// of one head of a sequence is a part. The parts of a head lie in neighbouring blocks, in the order of its keys. Shares follow from sizes
// alone, so every run sums up in the same order.
//
// Where P is a multiple of the heads, all heads are cut at the same keys: shares P / heads apart begin at the same key of different heads.
// In general `aligned_shares` of them do, the greatest common divisor of both, `share_distance` apart. Blocks that start one after the
// other have these shares: they read the same keys of neighbouring heads at the same time, whose rows may lie side by side in memory.
// Everything but `own_share` counts blocks in the order of their shares.

// The key tiles of a head, [first, first + count) of all tiles. A head is what meets keys together: the query heads of a GQA group, or some
// of their rows. It has a tile even if it has no key, so that somebody writes its output.
struct HeadTiles {
    int batch, head;
//% if cached
    int first, count;
    int part_cost;  // the first ones, which stand for what a part costs, and have no keys

//% else
    int first, count;

//% endif
    __device__ __forceinline__ int end() const { return first + count; }
};

// Heads of sequences of one length. Another layout of sequences needs another struct with these functions.
struct DenseKeyTiles {
    int of_head, heads, sequences;                 // tiles of each head, heads of each sequence
    u64 of_head_reciprocal, sequences_reciprocal;  // see divide

    __device__ __forceinline__ int tiles() const { return of_head * heads * sequences; }
    // The head that a tile belongs to.
    __device__ __forceinline__ HeadTiles head_of(int tile) const {
        const int number = divide(tile, of_head_reciprocal), head = divide(number, sequences_reciprocal);
        return {number - head * sequences, head, number * of_head, of_head};
    }
};

// The number of this block's share.
template <class Parameters>
__device__ __forceinline__ int own_share(const Parameters& p) {
    const int round = divide(block_index(), p.aligned_shares_reciprocal);
    return (block_index() - round * p.aligned_shares) * p.share_distance + round;
}

// Where the parts of a head lie: in blocks from `first_block` on.
struct HeadParts {
    int first_block, count;
    bool begins_share;  // whether the first part is the first one of its block
};

//% if cached
// `blocks` * `blocks` is below 2^31. Where they are more than the tiles, as many as these have one each.
//% else
// `blocks` * `blocks` is below 2^31. There are no more blocks than tiles, so each has some.
//% endif
template <class KeyTiles>
struct KeyShares {
    KeyTiles key_tiles;
    int tiles, blocks;
    u64 blocks_reciprocal;    // see divide: a block must know its share before it can load anything
    int quotient, remainder;  // of tiles / blocks

    __device__ __forceinline__ KeyShares(const KeyTiles& key_tiles, int blocks, u64 blocks_reciprocal)
        : key_tiles(key_tiles),
          tiles(key_tiles.tiles()),
          blocks(blocks),
          blocks_reciprocal(blocks_reciprocal),
          quotient(divide(tiles, blocks_reciprocal)),
//% if cached
          remainder(tiles - quotient * blocks) {
        if (tiles < blocks) this->blocks = tiles, quotient = 1, remainder = 0;  // of the other blocks each has none
    }

    // The first tile of a block, block * tiles / blocks without products of 64 bits. Behind the last block there are no more.
    __device__ __forceinline__ int first_tile(int block) const {
        block = min(block, blocks);
//% else
          remainder(tiles - quotient * blocks) {}

    // The first tile of a block, block * tiles / blocks without products of 64 bits.
    __device__ __forceinline__ int first_tile(int block) const {
//% endif
        return block * quotient + divide(block * remainder, blocks_reciprocal);
    }
    // The block that has a tile: a guess, which rounding leaves at most a block or two away.
    __device__ __forceinline__ int block_of(int tile) const {
        int block = min(static_cast<int>(static_cast<float>(tile) / static_cast<float>(tiles) * static_cast<float>(blocks)), blocks - 1);
        while (first_tile(block) > tile) --block;
        while (first_tile(block + 1) <= tile) ++block;
        return block;
    }
    __device__ __forceinline__ HeadParts parts(const HeadTiles& head) const {
        const int first_block = block_of(head.first);
        return {first_block, block_of(head.end() - 1) - first_block + 1, first_tile(first_block) == head.first};
    }
};

// A block's way through the parts of its share.
template <class KeyTiles>
struct KeyPart {
    HeadTiles head;
    int begin, end;    // its tiles among all
    int end_of_share;
    bool is_first;     // of the block

//% if cached
    __device__ __forceinline__ KeyPart(const KeyShares<KeyTiles>& shares, int block)
        : head{}, begin(shares.first_tile(block)), end(begin), end_of_share(shares.first_tile(block + 1)), is_first(true) {
        if (!exists()) return;
        head = shares.key_tiles.head_of(begin);
        end = min(head.end(), end_of_share);
    }
//% else
    __device__ __forceinline__ KeyPart(const KeyShares<KeyTiles>& shares, int block)
        : begin(shares.first_tile(block)), end_of_share(shares.first_tile(block + 1)), is_first(true) {
        find_head(shares);
    }
//% endif
    __device__ __forceinline__ bool exists() const { return begin < end_of_share; }
    __device__ __forceinline__ bool is_last() const { return end == end_of_share; }  // of the block
    // Whether it is all of its head: then nobody else has another part to add.
    __device__ __forceinline__ bool is_whole() const { return end - begin == head.count; }
//% if cached
    // The part's tiles with keys within its head: the first one, and how many, which may be none.
    __device__ __forceinline__ int first_in_head() const { return max(begin - head.first - head.part_cost, 0); }
    __device__ __forceinline__ int count() const { return max(end - head.first - head.part_cost, 0) - first_in_head(); }

//% else
    // The part's tiles within its head: the first one, and how many.
    __device__ __forceinline__ int first_in_head() const { return begin - head.first; }
    __device__ __forceinline__ int count() const { return end - begin; }

//% endif
    __device__ __forceinline__ void advance(const KeyShares<KeyTiles>& shares) {
        begin = end;
        is_first = false;
        if (exists()) find_head(shares);
    }

  private:
    __device__ __forceinline__ void find_head(const KeyShares<KeyTiles>& shares) {
//% if cached
        head = shares.key_tiles.head_behind(head);
//% else
        head = shares.key_tiles.head_of(begin);
//% endif
        end = min(head.end(), end_of_share);
    }
};
