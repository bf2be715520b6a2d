// Copies of tiles between global and shared memory, 16 bytes a thread and step, rows and columns past the end left out.

// How kThreads threads partition the copy of a tile: kLanes neighbours take a row together, each one chunk, and the same chunk of every
// further group of kLanes. So a thread's addresses within a row are constants apart, however the chunks are permuted.
template <int kThreads, class Tile>
struct CopyPartition {
    static constexpr int kLanes = Tile::kSwizzle, kGroups = Tile::kChunks / kLanes;
    static constexpr int kRowsPerPass = kThreads / kLanes;
    static constexpr int kPasses = (Tile::kRowCount + kRowsPerPass - 1) / kRowsPerPass;
    int row, chunk;  // of this thread in the first pass

    __device__ __forceinline__ explicit CopyPartition(int thread) : row(thread / kLanes), chunk(thread % kLanes) {}

    __device__ __forceinline__ bool has_row(int pass) const {
        return Tile::kRowCount % kRowsPerPass == 0 || pass * kRowsPerPass + row < Tile::kRowCount;
    }
    __device__ __forceinline__ bool has_column(int group, int columns_valid) const {
        return (group + 1) * kLanes * 8 <= columns_valid || (group * kLanes + chunk) * 8 < columns_valid;
    }
    __device__ __forceinline__ SharedAddress address(const Tile& tile, int pass, int group) const {
        if (kRowsPerPass % 8 == 0) return tile.at(row, chunk) + Tile::distance(pass * kRowsPerPass, group * kLanes);
        return tile.at(pass * kRowsPerPass + row, chunk) + Tile::distance(0, group * kLanes);
    }
};

// Copies the rows of a sequence to tiles, from the last to the first: it holds this thread's place in the tile that comes next, and
// goes backwards pass by pass, so that one stride is all it needs. The caller commits the groups. Columns from kColumnsValid on
// are not read: tiles hold zeros there.
template <class Tile, int kThreads, int kColumnsValid, class Element>
struct TileReader {
    using Passes = CopyPartition<kThreads, Tile>;
    Passes partition;
    const Element* source;
    i64 row_stride;

    // `rows` points at the first row of the first tile to be copied.
    __device__ __forceinline__ TileReader(const Element* rows, i64 row_stride)
        : partition(thread_index()),
          source(rows + (partition.row + (Passes::kPasses - 1) * Passes::kRowsPerPass) * row_stride + partition.chunk * 8),
          row_stride(row_stride) {}

    // Starts the copy of a tile of which only rows [begin, end) are read; it holds zeros in the others.
    __device__ __forceinline__ void load(const Tile& tile, int begin, int end) {
        pass_by_pass([&](int pass, int group, const Element* from) {
            const int row = pass * Passes::kRowsPerPass + partition.row;
            const bool valid = begin <= row && row < end && partition.has_column(group, kColumnsValid);
            cp_async_16(partition.address(tile, pass, group), from, valid);
        });
    }

    // The same for a tile of which all rows from kBegin on are read; the others are left alone.
    template <int kBegin = 0>
    __device__ __forceinline__ void load(const Tile& tile) {
        pass_by_pass([&](int pass, int group, const Element* from) {
            const int first = pass * Passes::kRowsPerPass;
            if (first + Passes::kRowsPerPass <= kBegin || (first < kBegin && first + partition.row < kBegin)) return;
            if ((group + 1) * Passes::kLanes * 8 <= kColumnsValid)
                cp_async_16(partition.address(tile, pass, group), from);
            else
                cp_async_16(partition.address(tile, pass, group), from, partition.has_column(group, kColumnsValid));
        });
    }

    template <class Copy>
    __device__ __forceinline__ void pass_by_pass(const Copy& copy) {
#pragma unroll
        for (int pass = Passes::kPasses - 1; pass >= 0; --pass) {
#pragma unroll
            for (int group = 0; group < Passes::kGroups; ++group)
                if (partition.has_row(pass)) copy(pass, group, source + group * Passes::kLanes * 8);
            source -= Passes::kRowsPerPass * row_stride;
            launder(source);
        }
        source += (Passes::kPasses * Passes::kRowsPerPass - Tile::kRowCount) * row_stride;
    }
};

// Writes the tile's valid rows and columns to memory. `thread` is the caller's among the kThreads that do it.
template <int kThreads, int kColumnsValid, class Element, class Tile>
__device__ __forceinline__ void store_tile(Element* rows, i64 row_stride, int rows_valid, const Tile& tile, int thread) {
    const CopyPartition<kThreads, Tile> partition(thread);
    Element* destination = rows + partition.row * row_stride + partition.chunk * 8;
#pragma unroll
    for (int pass = 0; pass < partition.kPasses; ++pass) {
#pragma unroll
        for (int group = 0; group < partition.kGroups; ++group)
            if (partition.has_row(pass) && pass * partition.kRowsPerPass + partition.row < rows_valid &&
                partition.has_column(group, kColumnsValid))
                *reinterpret_cast<uint4*>(destination + group * partition.kLanes * 8) =
                    load_shared_v4(partition.address(tile, pass, group));
        destination += partition.kRowsPerPass * row_stride;
    }
}
