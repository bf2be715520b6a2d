// A tile in shared memory and its swizzle: where element (row, column) lies.

// kRows x kColumns 16-bit elements, row-major in chunks of 16 bytes (8 elements). Within a row the chunks are permuted so that
// 8 rows of one chunk column, which is what ldmatrix reads at once, fall into 8 different groups of 4 banks. Rows that
// are 2^k * odd chunks long come back to the same bank group every 8 / 2^k rows, so an XOR of the k low bits is enough.
// Padding each row would do that too, but asynchronous copies of 128 bytes would then straddle two lines and take twice as long.
template <int kRows, int kColumns>
struct SharedTile {
    static_assert(kColumns % 16 == 0, "the matrix product reads 16 columns at a time");
    static constexpr int kRowCount = kRows, kChunks = kColumns / 8;
    static constexpr int kSwizzle = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
    static constexpr int kRowBytes = kChunks * 16;
    static constexpr int kBytes = kRows * kRowBytes;

    SharedAddress base;

    __device__ __forceinline__ SharedAddress at(int row, int chunk) const {
        const int group = chunk / kSwizzle * kSwizzle, permuted = chunk % kSwizzle ^ row / (8 / kSwizzle) % kSwizzle;
        return base + static_cast<u32>(row * kRowBytes + (group + permuted) * 16);
    }
    // From (row, chunk) to (row + rows, chunk + chunks): the same for all places if `rows` is a multiple of 8 and `chunks` one of kSwizzle.
    __device__ __forceinline__ static constexpr u32 distance(int rows, int chunks) { return rows * kRowBytes + chunks * 16; }
};
