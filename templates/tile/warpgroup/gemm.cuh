// The two matrix products of attention, for one warpgroup and its 64 query rows: S = Q K^T and O += P V. Both are issued, not waited for.
// In the backward pass the first one computes S^T = K Q^T and dP^T = V dO^T, with 64 keys as rows: there `queries` is K or V, `keys` is Q
// or dO.

// S = Q K^T over kColumns columns, for the rows of Q from `row` on.
template <class Element, int kColumns, class QueryTile, class KeyTile, int kKeyTiles>
__device__ __forceinline__ void gemm_scores(float (&S)[kKeyTiles][4], QueryTile queries, int row, KeyTile keys) {
    launder(queries.base);  // else the descriptors of all steps, which change rarely, would occupy registers
    launder(keys.base);
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step)
        wgmma_ss<Element, kKeyTiles * 8>(S, queries.k_major(row, step), keys.k_major(0, step), step > 0);
}

//% if overwrites
// O += P V, or unless `accumulate` O = P V.
template <class Element, class ValueTile, int kSteps, int kOutTiles>
__device__ __forceinline__ void gemm_output(float (&O)[kOutTiles][4], const u32 (&P)[kSteps][4], ValueTile values, int accumulate = 1) {
    launder(values.base);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        wgmma_rs<Element, kOutTiles * 8>(O, P[step], values.mn_major(step), step > 0 ? 1 : accumulate);
}
//% else
// O += P V.
template <class Element, class ValueTile, int kSteps, int kOutTiles>
__device__ __forceinline__ void gemm_output(float (&O)[kOutTiles][4], const u32 (&P)[kSteps][4], ValueTile values) {
    launder(values.base);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        wgmma_rs<Element, kOutTiles * 8>(O, P[step], values.mn_major(step), 1);
}
//% endif
