// Online softmax in base 2: Milakov and Gimelshein 2018, in the form of FlashAttention-2, algorithm 1.

// By how much ex2.approx is too small on average, relatively, for arguments from -16 to -1 (measured on sm_90). For one value that
// is nothing; it is put right where it adds up: in the sum, and in the factor that rescales the sum tile after tile.
constexpr float kEx2Lean = 5.0e-8f;

// log(total) + maximum * (scale + scale_low), to about one rounding. fp32 needs some care for that: the two terms are taken apart
// into what is rounded once, in the end, and small corrections. `total` is finite and > 0, or NaN.
__device__ __forceinline__ float log_sum_exp(float maximum, float total, float scale, float scale_low, float scale_log2) {
    constexpr float kLn2 = 0.693147182f, kLn2Low = -1.90465430e-9f;
    // total = fraction * 2^exponent, with a fraction from 1 to 2 whose logarithm is small.
    const int biased = __float_as_int(total) >> 23;
    const float exponent = static_cast<float>(biased - 127), fraction = total * __int_as_float((254 - biased) << 23);
    const float a = mul_rn(maximum, scale), b = mul_rn(exponent, kLn2);
    const float sum = a + b, b_in_sum = sum - a;
    const float lost_in_sum = (a - (sum - b_in_sum)) + (b - b_in_sum);  // exactly (Knuth's TwoSum)
    const float lost_in_products = fmaf(maximum, scale, -a) + fmaf(exponent, kLn2, -b);
    const float low_parts = maximum * scale_low + exponent * kLn2Low;
    const float lean = kEx2Lean * (1.0f - 1.0f / total);  // the maximum's own 2^0 = 1 is exact
    // `total` is relative to the rounded reference of `OnlineSoftmax::update`, not to maximum * scale_log2.
    const float lost_in_reference = kLn2 * fmaf(-maximum, scale_log2, mul_rn(maximum, scale_log2));
    return sum + (natural_log(fraction) + (lost_in_sum + lost_in_products + low_parts + lost_in_reference + lean));
}

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
                // The difference of two rounded products, so the factor is exactly 1 while the maximum stays.
                const float factor = ex2_approx_ftz(mul_rn(maximum[i][h], scale_log2) - reference);
                maximum[i][h] = highest;

                float partial = 0.0f;
#pragma unroll
                for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) {
                        scores[i][j][e] = ex2_approx_ftz(fmaf(scores[i][j][e], scale_log2, -reference));
                        partial += scores[i][j][e];
                    }
                const float factor_of_sum = fmaf(factor, kEx2Lean, factor);
                const float before = mul_rn(sum[i][h], factor_of_sum);
                sum[i][h] = before + partial;
                lost[i][h] = fmaf(lost[i][h], factor_of_sum, partial - (sum[i][h] - before));
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) out[i][j][e] *= factor;
            }
    }

    // Normalises the output and turns `sum` into the natural log-sum-exp of the scaled scores. The scale is given in two parts,
    // scale + scale_low, and as scale_log2 = scale * log2(e). A row that saw no key gets 0 and -inf.
    template <int kOutTiles>
    __device__ __forceinline__ void finish(float (&out)[kRowTiles][kOutTiles][4], float scale, float scale_low, float scale_log2) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float total = sum[i][h] + lost[i][h];
                total += shfl_sync_bfly(total, 1);
                total += shfl_sync_bfly(total, 2);
                const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
                sum[i][h] = total == 0.0f ? -infinity() : log_sum_exp(maximum[i][h], total, scale, scale_low, scale_log2);
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) out[i][j][e] *= inverse;
            }
    }
};
