// Copies of a tile from global to shared memory, where both its rows and its columns may reach past the end of what there is.

// Starts the copy of the tile whose first element is `*source`. The caller's kThreads threads take part and commit the group. Elements from
// row `rows_valid` or column `columns_valid` on are not read, and the tile holds zeros there. Each row is read in chunks of 8 elements: the
// last one may reach beyond `columns_valid`.
template <int kThreads, class Tile, class Element>
__device__ __forceinline__ void load_tile(const Tile& tile, const Element* source, i64 row_stride, int rows_valid, int columns_valid) {
    const CopyPartition<kThreads, Tile> partition(thread_index());
    const Element* from = source + partition.row * row_stride + partition.chunk * 8;
#pragma unroll
    for (int pass = 0; pass < partition.kPasses; ++pass) {
        const bool valid = pass * partition.kRowsPerPass + partition.row < rows_valid;
#pragma unroll
        for (int group = 0; group < partition.kGroups; ++group)
            if (partition.has_row(pass))
                cp_async_16(partition.address(tile, pass, group), from + group * partition.kLanes * 8,
                            valid && partition.has_column(group, columns_valid));
        from += partition.kRowsPerPass * row_stride;
        launder(from);  // or the compiler would keep the addresses of all passes in registers of their own
    }
}
