// A transposed accumulator, with keys or columns of the head as rows and queries as columns, on its way to other products: as an operand in
// registers, and through shared memory as a tile with a row for each query.

// Rounds: two neighbouring column tiles of an accumulator are an operand of 16 queries.
template <class Element, int kTiles>
__device__ __forceinline__ void round_to_operand(u32 (&operand)[kTiles / 2][4], const float (&x)[kTiles][4]) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) operand[j / 2][j % 2 * 2 + h] = cvt_rn_x2<Element>(x[j][h * 2], x[j][h * 2 + 1]);
}

// product += operand * rows, over 16 queries a step, those from kBegin to kEnd. Issued, not waited for.
template <class Element, int kBegin, int kEnd, class RowTile, int kSteps, int kTiles>
__device__ __forceinline__ void gemm_over_queries(float (&product)[kTiles][4], const u32 (&operand)[kSteps][4], RowTile rows) {
    launder(rows.base);
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) wgmma_rs<Element, kTiles * 8>(product, operand[step], rows.mn_major(step), 1);
}

// Stores a warp's 16 rows as columns `first_column` (a multiple of 16) and on of a tile.
template <class Tile, int kSteps>
__device__ __forceinline__ void store_transposed(const Tile& tile, int first_column, const u32 (&operand)[kSteps][4]) {
    const int lane = lane_index(), row = lane % 8 + lane / 16 * 8, chunk = first_column % 64 / 8 + lane / 8 % 2;
    const SharedAddress own = PanelTile<16, 64>{tile.base + first_column / 64 * Tile::kPanelBytes}.at(row, chunk);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        stmatrix_x4_trans(own + step * 16 * 128, operand[step][0], operand[step][1], operand[step][2], operand[step][3]);
}
