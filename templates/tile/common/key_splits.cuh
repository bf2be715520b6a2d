// Splits of a fixed number of keys, in place of equal shares: where what comes out for a sequence must be the same to the bit whatever else
// is in the batch, and on every GPU. The keys of a head are divided after a fixed number of key tiles, its parts are these splits alone,
// and they are added up from the first to the last. Blocks have equal numbers of them.

// As KeyShares, of splits in place of tiles: KeyTiles counts those.
template <class KeyTiles>
struct KeySplits : KeyShares<KeyTiles> {
    using KeyShares<KeyTiles>::KeyShares;

    // Each split has slots for its partial output as if it were a block of its own.
    __device__ __forceinline__ HeadParts parts(const HeadTiles& head) const { return {head.first, head.count, true}; }
};

// A block's way through its splits, one after the other, with the functions of KeyPart.
template <class KeyTiles>
struct KeySplit {
    HeadTiles head;  // in splits
    int split, end_of_share;

    __device__ __forceinline__ KeySplit(const KeySplits<KeyTiles>& splits, int block)
        : head{}, split(splits.first_tile(block)), end_of_share(splits.first_tile(block + 1)) {
        if (exists()) head = splits.key_tiles.head_of(split);
    }
    __device__ __forceinline__ bool exists() const { return split < end_of_share; }
    // Whether it is all of its head: then nobody else has another part to add.
    __device__ __forceinline__ bool is_whole() const { return head.count == 1; }
    // Its number within its head, and how many splits a part is.
    __device__ __forceinline__ int first_in_head() const { return split - head.first; }
    __device__ __forceinline__ int count() const { return 1; }

    __device__ __forceinline__ void advance(const KeySplits<KeyTiles>& splits) {
        ++split;
//% if cached
        if (exists() && split == head.end()) head = splits.key_tiles.head_behind(head);
//% else
        if (exists() && split == head.end()) head = splits.key_tiles.head_of(split);
//% endif
    }
};
