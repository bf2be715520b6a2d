// Online softmax in base 2: Milakov and Gimelshein 2018, in the form of FlashAttention-2, algorithm 1.

// The state of a warp's rows. [i][h] belongs to row i*16 + h*8 + lane/4; the four lanes of a row hold the same maximum,
// and each the sum over its own columns until `finish` adds them up.
template <int kRowTiles>
struct OnlineSoftmax {
    float maximum[kRowTiles][2];  // of the raw scores
    float sum[kRowTiles][2];      // of exp2(scale_log2 * (score - maximum))
    float lost[kRowTiles][2];     // what the additions to `sum` rounded away (Dekker 1971): it adds up over many tiles

    __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                maximum[i][h] = -infinity();
                sum[i][h] = 0.0f;
                lost[i][h] = 0.0f;
            }
    }

    // Turns a tile of scores into probabilities relative to the new maximum, in place, and rescales what was summed before.
    template <int kKeyTiles, int kOutTiles>
    __device__ __forceinline__ void update(float (&scores)[kRowTiles][kKeyTiles][4], float (&out)[kRowTiles][kOutTiles][4],
                                           float scale_log2) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float highest = maximum[i][h];
#pragma unroll
                for (int j = 0; j < kKeyTiles; ++j) highest = fmaxf(highest, fmaxf(scores[i][j][h * 2], scores[i][j][h * 2 + 1]));
                highest = fmaxf(highest, shfl_sync_bfly(highest, 1));
                highest = fmaxf(highest, shfl_sync_bfly(highest, 2));
                // A row that has seen no key yet: its scores are all -inf, and -inf - (-inf) would be NaN.
                const float reference = highest == -infinity() ? 0.0f : mul_rn(highest, scale_log2);
                // The difference of two rounded products, so exactly 0 while the maximum stays. A fused one would rescale by
                // the rounding error of the reference, tile after tile.
                const float rescale = ex2_approx_ftz(mul_rn(maximum[i][h], scale_log2) - reference);
                maximum[i][h] = highest;

                float partial = 0.0f;
#pragma unroll
                for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) {
                        scores[i][j][e] = ex2_approx_ftz(fmaf(scores[i][j][e], scale_log2, -reference));
                        partial += scores[i][j][e];
                    }
                const float before = mul_rn(sum[i][h], rescale);
                sum[i][h] = before + partial;
                lost[i][h] = fmaf(lost[i][h], rescale, partial - (sum[i][h] - before));
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) out[i][j][e] *= rescale;
            }
    }

    // Normalises the output and turns `sum` into the natural log-sum-exp of the scaled scores. The scale is given in two parts,
    // scale + scale_low, and as scale_log2 = scale * log2(e). A row that saw no key gets 0 and -inf.
    template <int kOutTiles>
    __device__ __forceinline__ void finish(float (&out)[kRowTiles][kOutTiles][4], float scale, float scale_low, float scale_log2) {
        constexpr float kLn2 = 0.693147180559945309f;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float total = sum[i][h] + lost[i][h];
                total += shfl_sync_bfly(total, 1);
                total += shfl_sync_bfly(total, 2);
                const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
                // `total` is relative to the rounded product maximum * scale_log2, whose rounding error an fma recovers.
                const float rounding = fmaf(-maximum[i][h], scale_log2, mul_rn(maximum[i][h], scale_log2));
                const float small = fmaf(maximum[i][h], scale_low, fmaf(kLn2, rounding, natural_log(total)));
                sum[i][h] = total == 0.0f ? -infinity() : fmaf(maximum[i][h], scale, small);
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) out[i][j][e] *= inverse;
            }
    }
};
