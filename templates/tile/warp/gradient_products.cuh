// Products of P^T and dS^T tiles in shared memory, which have a row for each key and a column for each query.

// product += A B for the 16 queries of a slice: A is a warp's rows of P^T or dS^T, and B has a row for each query.
template <class Element, int kRowTiles, int kTiles, int kBlockQ, int kColumns, int kGroups>
__device__ __forceinline__ void gemm_columns(float (&product)[kRowTiles][kTiles][4], const LeftInShared<kBlockQ>& a, int slice,
                                             SharedAddress rows, const ColumnGroup<kColumns, kGroups>& columns) {
    u32 fragments[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) a.fragment(fragments[i], i, slice);
    gemm_columns<Element>(product, fragments, rows, slice * 16, columns);
}

// Rows of dS, which are columns of a tile of dS^T: kRowTiles * 16 queries from row tile `row_tile` on, as this lane loads them transposed.
template <class ScoreTile, int kRowTiles>
struct TransposedRows {
    SharedAddress rows[kRowTiles];

    __device__ __forceinline__ TransposedRows(const ScoreTile& tile, int row_tile) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
            rows[i] = tile.at(lane_index() / 16 * 8 + lane_index() % 8, (row_tile + i) * 2 + lane_index() / 8 % 2);
    }
    __device__ __forceinline__ void fragments(u32 (&a)[kRowTiles][4], int slice) const {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) ldmatrix_x4_trans(a[i], rows[i] + ScoreTile::distance(slice * 16, 0));
    }
};

// dQ = dS K over all keys of a block.
template <class Element, class ScoreTile, int kRowTiles, int kTiles, int kColumns, int kGroups>
__device__ __forceinline__ void gemm_over_keys(float (&dQ)[kRowTiles][kTiles][4], const TransposedRows<ScoreTile, kRowTiles>& dS,
                                               SharedAddress keys, const ColumnGroup<kColumns, kGroups>& columns) {
#pragma unroll
    for (int slice = 0; slice < ScoreTile::kRowCount / 16; ++slice) {
        u32 a[kRowTiles][4];
        dS.fragments(a, slice);
        gemm_columns<Element>(dQ, a, keys, slice * 16, columns);
    }
}
