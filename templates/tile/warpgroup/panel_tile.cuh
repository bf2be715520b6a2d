// A tile in shared memory as tensor copies with 128-byte swizzle write it and wgmma reads it: panels of 64 columns, one after the other,
// each kRows rows of 128 bytes. Within a panel the 16-byte chunks of row r are permuted: chunk c lies at c xor r % 8.

template <int kRows, int kColumns>
struct PanelTile {
    static constexpr int kPanels = (kColumns + 63) / 64, kPanelBytes = kRows * 128, kBytes = kPanels * kPanelBytes;
    SharedAddress base;

//% if packed
    // Loads a tile of a packed sequence, all columns: `row` and `end` are coordinates 1 and 3 of its first row, see packed_sequences.cuh.
    // What lies outside of the sequence becomes zeros.
    __device__ __forceinline__ void load(const TensorMap& map, SharedAddress barrier, int row, int head, int end) const {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            cp_async_bulk_tensor_load_5d(base + panel * kPanelBytes, map, barrier, panel * 64, row, head, end, kMapRows);
    }
//% else
    // Loads a tile, all columns. coordinate1 and coordinate2 are row and head of the first row; in Q's map under PackGQA head and row. What
    // lies outside of the tensor becomes zeros.
    __device__ __forceinline__ void load(const TensorMap& map, SharedAddress barrier, int coordinate1, int coordinate2, int batch) const {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            cp_async_bulk_tensor_load(base + panel * kPanelBytes, map, barrier, panel * 64, coordinate1, coordinate2, batch);
    }
//% endif
//% if cached
    // Loads a box of so many of the tile's rows as the map says, from `first` on, a multiple of 8; coordinates as in KeyBox.
    __device__ __forceinline__ void load_rows(int first, const TensorMap& map, SharedAddress barrier, int row, int head, int page) const {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            cp_async_bulk_tensor_load(base + panel * kPanelBytes + first * 128, map, barrier, panel * 64, row, head, page);
    }
    // Zeroes the rows [begin, end), by `threads` threads, of which this one is `thread`. They have to fence, and to meet.
    __device__ __forceinline__ void clear_rows(int begin, int end, int thread, int threads) const {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll 1
            for (int i = begin * 8 + thread; i < end * 8; i += threads) store_shared_v4(base + panel * kPanelBytes + i * 16, {0, 0, 0, 0});
    }
//% endif
    // Descriptor of the K-major operand of step `step` of the contraction: columns 16 * step and on, rows from `row` on, a multiple of 8.
    __device__ __forceinline__ u64 k_major(int row, int step) const {
        return matrix_descriptor(base, row * 128 + step / 4 * kPanelBytes + step % 4 * 32);
    }
    // Descriptor of the MN-major operand of step `step` of the contraction: rows 16 * step and on, all columns.
    __device__ __forceinline__ u64 mn_major(int step) const { return matrix_descriptor(base, step * 16 * 128, kPanelBytes); }
    __device__ __forceinline__ SharedAddress at(int row, int chunk) const { return base + row * 128 + ((chunk ^ row % 8) * 16); }
};
