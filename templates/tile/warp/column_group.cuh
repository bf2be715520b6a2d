// Products of which a warp computes only some columns: groups of warps divide them, and share what lies to the left of the product.

// The columns that a warp owns of an operand that is kColumns wide, which kGroups warps divide: every kGroups-th pair of chunks, which
// are 16 columns. Thus a lane finds them all by a few offsets and constants, as LaneOffsets in gemm.cuh does. The rows of the operand are
// the inner dimension of the product.
template <int kColumns, int kGroups>
struct ColumnGroup {
    using Rows = SharedTile<16, kColumns>;
    static constexpr int kPairs = kColumns / 16, kOwn = (kPairs + kGroups - 1) / kGroups;  // column pairs: all, and at most of a warp
    static constexpr int kPeriod = Rows::kSwizzle / 2;                                      // pairs after which the permutation comes back
    static constexpr int kOffsets = kPeriod > kGroups ? kPeriod / kGroups : 1;
    int group;
    u32 offset[kOffsets];

    // A warp that owns all columns finds them by the same offsets as `lanes`: they share registers.
    __device__ __forceinline__ ColumnGroup(const LaneOffsets<kColumns>& lanes, int group) : group(group) {
        const int lane = lane_index();
#pragma unroll
        for (int i = 0; i < kOffsets; ++i)
            offset[i] = kGroups == 1 ? lanes.offset[i] : Rows{0}.at(lane % 16, pair(i) * 2 + lane / 16);
    }
    __device__ __forceinline__ int pair(int own) const { return own * kGroups + group; }
    __device__ __forceinline__ bool has(int own) const { return own < kPairs / kGroups || pair(own) < kPairs; }
    __device__ __forceinline__ SharedAddress at(SharedAddress tile, int rows, int own) const {
        return offset[own % kOffsets] + tile + Rows::distance(rows, own / kOffsets * kOffsets * kGroups * 2);
    }
};

// product += A B for 16 rows of B, from row `row` of the tile at `rows` on: the columns that the warp owns, two column tiles of 8 a pair.
template <class Element, int kRowTiles, int kTiles, int kColumns, int kGroups>
__device__ __forceinline__ void gemm_columns(float (&product)[kRowTiles][kTiles][4], const u32 (&a)[kRowTiles][4], SharedAddress rows,
                                             int row, const ColumnGroup<kColumns, kGroups>& columns) {
    static_assert(kTiles == ColumnGroup<kColumns, kGroups>::kOwn * 2, "two column tiles a pair");
#pragma unroll
    for (int own = 0; own < kTiles / 2; ++own) {
        if (!columns.has(own)) continue;
        u32 b[4];  // rows 0-7 and rows 8-15 of columns 0-7, then the same of columns 8-15, each transposed
        ldmatrix_x4_trans(b, columns.at(rows, row, own));
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            mma_sync_m16n8k16<Element>(product[i][own * 2], a[i], b[0], b[1]);
            mma_sync_m16n8k16<Element>(product[i][own * 2 + 1], a[i], b[2], b[3]);
        }
    }
}

// Rounds a warp's rows, from `first_row` of the tile on, of the columns that it owns, and writes them to the tile.
template <class Element, class Tile, int kRowTiles, int kTiles, int kColumns, int kGroups>
__device__ __forceinline__ void store_columns(const Tile& tile, int first_row, const float (&product)[kRowTiles][kTiles][4], float scale,
                                              const ColumnGroup<kColumns, kGroups>& columns) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
                if (columns.has(j / 2))
                    store_shared(tile.at(first_row + i * 16 + h * 8 + lane / 4, columns.pair(j / 2) * 2 + j % 2) + lane % 4 * 4,
                                 cvt_rn_x2<Element>(product[i][j][h * 2] * scale, product[i][j][h * 2 + 1] * scale));
}
