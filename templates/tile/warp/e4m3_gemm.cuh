// The matrix products of attention where keys and values are e4m3 numbers: two of them are what an fp16 number is elsewhere, so tiles in
// shared memory have half as many columns. Registers turn them into fp16, which is exact. Then a lane has other columns than the product
// expects of it, in the same order in all lanes.

// S = Q K^T. Of 16 columns a lane has columns 4t to 4t + 3 of a key, t = lane % 4, which the product takes for 2t, 2t + 1, 2t + 8 and
// 2t + 9: so the columns of Q are in this order, see `load_scaled_queries`. The tile at `keys` holds one key a row.
template <class Query, int kRowTiles, int kKeyTiles, int kPairs>
__device__ __forceinline__ void gemm_scores_e4m3(float (&S)[kRowTiles][kKeyTiles][4], const Query& query, SharedAddress keys,
                                                 const LaneOffsets<kPairs>& offsets) {
    const SharedAddress own_keys = keys + offsets.to_keys;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) S[i][j][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < kPairs / 16; ++k) {
        u32 four[kKeyTiles / 2][4];  // of 16 keys: (keys 0-7, d 0-15), (keys 0-7, d 16-31), (keys 8-15, d 0-15), (keys 8-15, d 16-31)
#pragma unroll
        for (int j = 0; j < kKeyTiles / 2; ++j) ldmatrix_x4(four[j], offsets.at(own_keys, j * 16, k * 2));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 a[kRowTiles][4];
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) query.fragment(a[i], i, k * 2 + half);
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                u32 b[2];
                cvt_f16x2_e4m3x2(b, four[j / 2][j % 2 * 2 + half]);
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) mma_sync_m16n8k16<Fp16>(S[i][j], a[i], b[0], b[1]);
            }
        }
    }
}

// O += P V for a slice of 16 keys. Transposed, a lane has two columns, 2g and 2g + 1, g = lane / 4, of two keys: of 16 columns O[i][j] gets
// the even ones, O[i][j + 1] the odd ones, and a lane has 4t to 4t + 3 of them. The tile at `values` holds one key a row.
template <int kRowTiles, int kOutTiles, int kPairs>
__device__ __forceinline__ void gemm_output_e4m3(float (&O)[kRowTiles][kOutTiles][4], const u32 (&P)[kRowTiles][4], int slice,
                                                 SharedAddress values, const LaneOffsets<kPairs>& offsets) {
    constexpr u32 kByColumn = 0x3120;  // of a key's columns 0 and 1, then the next key's: both keys of column 0, then of column 1
#pragma unroll
    for (int j = 0; j < kOutTiles; j += 4) {
        u32 four[4];  // (keys 0-7, d 0-15), (keys 8-15, d 0-15), (keys 0-7, d 16-31), (keys 8-15, d 16-31), each transposed
        ldmatrix_x4_trans(four, offsets.at(values, slice * 16, j / 2));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 b[2][2];
            cvt_f16x2_e4m3x2(b[0], prmt(four[half * 2], kByColumn));
            cvt_f16x2_e4m3x2(b[1], prmt(four[half * 2 + 1], kByColumn));
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) mma_sync_m16n8k16<Fp16>(O[i][j + half * 2 + odd], P[i], b[0][odd], b[1][odd]);
        }
    }
}
