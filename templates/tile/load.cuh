// Copies of tiles between global and shared memory, 16 bytes a thread and pass, rows and columns past the end left out.

// How the threads of a block cover a tile. A pass takes as many whole rows as there are threads for, so that a thread keeps
// its chunk and its addresses advance by constants; threads that a pass does not need idle.
template <int kThreads, int kRows, int kChunks>
struct Passes {
    static constexpr int kRowsPerPass = kThreads / kChunks;
    static constexpr int kCount = (kRows + kRowsPerPass - 1) / kRowsPerPass;
    static constexpr bool kEven = kThreads % kChunks == 0 && kRows % kRowsPerPass == 0;  // every thread has a row in each pass
    static constexpr bool kSameSwizzle = kRowsPerPass % 8 == 0;                          // all rows of a thread are permuted alike
    int row = thread_index() / kChunks, chunk = thread_index() % kChunks;                // of this thread in the first pass

    __device__ __forceinline__ bool has_row(int pass) const {
        return kEven || (row < kRowsPerPass && pass * kRowsPerPass + row < kRows);
    }

    template <class Tile>
    __device__ __forceinline__ SharedAddress address(const Tile& tile, int pass) const {
        if (kSameSwizzle) return tile.place(row, chunk).at(pass * kRowsPerPass, 0);
        return tile.place(pass * kRowsPerPass + row, chunk).at(0, 0);
    }
};

// Starts the copy of a tile. `rows` points at the tile's first row; rows from `rows_valid` on and columns from kColumnsValid
// on are not read: the tile holds zeros there. The caller commits the group.
template <int kThreads, int kColumnsValid, class Element, int kRows, int kColumns>
__device__ __forceinline__ void load_tile_async(const SharedTile<kRows, kColumns>& tile, const Element* rows, i64 row_stride,
                                                int rows_valid) {
    using Cover = Passes<kThreads, kRows, kColumns / 8>;
    const Cover cover;
    const Element* source = rows + cover.row * row_stride + cover.chunk * 8;
#pragma unroll
    for (int pass = 0; pass < Cover::kCount; ++pass) {
        const bool valid = pass * Cover::kRowsPerPass + cover.row < rows_valid && cover.chunk * 8 < kColumnsValid;
        if (cover.has_row(pass)) cp_async_16(cover.address(tile, pass), source, valid);
        source += Cover::kRowsPerPass * row_stride;
    }
}

// Writes the tile's valid rows and columns to global memory.
template <int kThreads, int kColumnsValid, class Element, int kRows, int kColumns>
__device__ __forceinline__ void store_tile(Element* rows, i64 row_stride, int rows_valid, const SharedTile<kRows, kColumns>& tile) {
    using Cover = Passes<kThreads, kRows, kColumnsValid / 8>;
    const Cover cover;
    Element* destination = rows + cover.row * row_stride + cover.chunk * 8;
#pragma unroll
    for (int pass = 0; pass < Cover::kCount; ++pass) {
        if (cover.has_row(pass) && pass * Cover::kRowsPerPass + cover.row < rows_valid)
            *reinterpret_cast<uint4*>(destination) = load_shared_v4(cover.address(tile, pass));
        destination += Cover::kRowsPerPass * row_stride;
    }
}
