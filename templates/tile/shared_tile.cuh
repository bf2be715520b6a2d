// A tile in shared memory and its swizzle: where element (row, column) lies.

// A place in a tile that a thread computes once, and from which it reaches others by constants that fold into its
// instructions: `at` adds rows in multiples of 8, which leave the permutation as it is, and chunks that have no bit in common
// with the place's own.
template <int kRowBytes, int kSwizzle>
struct SharedPlace {
    SharedAddress row;
    u32 permuted;  // byte offset of the place's chunk within its group of kSwizzle chunks, permuted

    __device__ __forceinline__ SharedAddress at(int rows, int chunks) const {
        return row + (permuted ^ chunks % kSwizzle * 16) + (rows * kRowBytes + chunks / kSwizzle * kSwizzle * 16);
    }
};

// kRows x kColumns 16-bit elements, row-major in chunks of 16 bytes (8 elements). Within a row the chunks are permuted so that
// 8 rows of one chunk column, which is what ldmatrix reads at once, fall into 8 different groups of 4 banks. Rows that
// are 2^k * odd chunks long come back to the same bank group every 8 / 2^k rows, so an XOR of the k low bits is enough.
template <int kRows, int kColumns>
struct SharedTile {
    static_assert(kColumns % 16 == 0, "the matrix product reads 16 columns at a time");
    static constexpr int kChunks = kColumns / 8;
    static constexpr int kBytes = kRows * kColumns * 2;
    static constexpr int kSwizzle = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
    using Place = SharedPlace<kChunks * 16, kSwizzle>;

    SharedAddress base;

    __device__ __forceinline__ Place place(int row, int chunk) const {
        const int group = chunk / kSwizzle * kSwizzle, permuted = chunk % kSwizzle ^ row / (8 / kSwizzle) % kSwizzle;
        return {base + static_cast<u32>((row * kChunks + group) * 16), static_cast<u32>(permuted * 16)};
    }
};
