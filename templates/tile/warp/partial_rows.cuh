// What each of a block's key groups has of the rows of a part, and their sum in the order of the groups.

// One group's rows in shared memory, kColumns columns of them: O in fp32, not normalised, and with each row its sum and origin. The gap
// between rows puts what a warp writes at once into different banks.
template <int kRows, int kColumns>
struct GroupRows {
    static constexpr int kRowBytes = kColumns * 4 + 32, kBytes = kRows * kRowBytes;
    SharedAddress base;

    __device__ __forceinline__ SharedAddress at(int row, int column) const { return base + row * kRowBytes + column * 4; }
    __device__ __forceinline__ SharedAddress statistics(int row) const { return at(row, kColumns); }

    // Writes columns [slice * kColumns, (slice + 1) * kColumns) of a warp's rows from `first_row` on, as far as they exist.
    template <int kRowTiles, int kOutTiles, class Softmax>
    __device__ __forceinline__ void store(const float (&O)[kRowTiles][kOutTiles][4], const Softmax& softmax, int slice, int first_row,
                                          int rows) const {
        const int lane = lane_index();
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const LaneSums sums = LaneSums::load(softmax.slot(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = first_row + i * 16 + h * 8 + lane / 4;
                const float total = quad_sum(sums.row_sum[h] + sums.compensation[h]);
                if (row >= rows) continue;
                if (lane % 4 == 0)
                    store_shared_v4(statistics(row), {__float_as_uint(total), __float_as_uint(softmax.shift[i][h]),
                                                      __float_as_uint(softmax.row_max[i][h]), 0});
#pragma unroll
//% if e4m3
                for (int j = slice * kColumns / 8; j < kOutTiles && j < (slice + 1) * kColumns / 8; j += 2)  // see gemm_output_e4m3
                    store_shared_v4(at(row, j * 8 - slice * kColumns + lane % 4 * 4),
                                    {__float_as_uint(O[i][j][h * 2]), __float_as_uint(O[i][j + 1][h * 2]),
                                     __float_as_uint(O[i][j][h * 2 + 1]), __float_as_uint(O[i][j + 1][h * 2 + 1])});
//% else
                for (int j = slice * kColumns / 8; j < kOutTiles && j < (slice + 1) * kColumns / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        store_shared(at(row, j * 8 - slice * kColumns + lane % 4 * 2 + e), __float_as_uint(O[i][j][h * 2 + e]));
//% endif
            }
        }
    }
};

// Shared memory for the rows of kGroups groups, which go through it in slices of some columns, as rings need the rest of it.
template <int kGroups, int kRows, int kColumns>
struct GroupSums {
    static constexpr int kSliceColumns = kColumns < 64 ? kColumns : 64, kSlices = (kColumns + 63) / 64;
    using Slice = GroupRows<kRows, kSliceColumns>;
    static constexpr int kBytes = kGroups * Slice::kBytes;
    SharedAddress base;

    // Adds up the groups' rows, in this order. Each of the block's kThreads threads takes some groups of four columns, for which it calls
    // store(row, column, MergedRow).
    template <int kThreads, int kRowTiles, int kOutTiles, class Softmax, class Store>
    __device__ __forceinline__ void merge(const float (&O)[kRowTiles][kOutTiles][4], Softmax& softmax, int own_group, int first_row,
                                          int rows, const Store& store) const {
        constexpr int kQuads = kSliceColumns / 4;
        softmax.add_partial();
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
            barrier_sync();  // nobody reads what lay here, or Q, any more
            of_group(own_group).store(O, softmax, slice, first_row, rows);
            barrier_sync();  // what all groups have is here
#pragma unroll 1
            for (int i = thread_index(); i < rows * kQuads; i += kThreads) {
                const int row = i / kQuads, column = i % kQuads * 4;
                if (slice * kSliceColumns + column >= kColumns) continue;  // the last slice may be narrower
                MergedRow merged;
#pragma unroll
                for (int group = 0; group < kGroups; ++group)
                    merged.add(load_shared_v4(of_group(group).at(row, column)), load_shared_v4(of_group(group).statistics(row)),
                               softmax.scale_log2);
                store(row, slice * kSliceColumns + column, merged);
            }
        }
    }

  private:
    __device__ __forceinline__ Slice of_group(int group) const { return {base + group * Slice::kBytes}; }
};
