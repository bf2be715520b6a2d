// What kernels share of softmax's rows: their origin, and in online softmax the running row max, and reductions over the quad of lanes that
// holds a row of S.

// Conditional rescaling: where softmax looks at the maximum of S, a warp's row maxima move only if S * scale_log2 exceeds one of them by
// more than this, FlashAttention-4's threshold. P is then at most 2^8, which fp16 holds.
constexpr float kHeadroom = 8.0f;

// The row max before the first key that a row sees. It is finite, because -inf - (-inf) would be NaN, and the maximum of every row that is
// not huge exceeds it.
constexpr float kInitialRowMax = -3.0e38f;

// One fused multiply-add computes an exponent, S * scale_log2 - row_max, where row_max is maximum * scale_log2, rounded. A large row_max
// has a large rounding error: from 2^31 on it can reach half an ulp = 2^7, and 2^(2^7) overflows fp32. So a huge row first subtracts the
// maximum itself, without the scale: its exponent is (S - shift) * scale_log2, with row_max = 0. All other rows have shift = 0.
struct Origin {
    float shift, row_max;
};

// A row is huge if the absolute value of its maximum * scale_log2 is at least this. Below it, rounding the maximum changes an exponent by
// at most 2^-12 and P by at most 1.7e-4 of it, less than half an fp16 ulp just below 1 (2^-12): so the P of the maximum is still 1.
constexpr float kHuge = 0x1p13f;

// Whether a row with this maximum is huge; maximum_log2 = maximum * scale_log2. A row that sees no key, with a maximum of -inf, is not,
// nor is one whose maximum is NaN: the second comparison excludes both. So >= would do as well as !(<), which is what has been measured.
__device__ __forceinline__ bool is_huge(float maximum, float maximum_log2) {
    return !(fabsf(maximum_log2) < kHuge) && maximum > -infinity();
}

// The origin for a maximum. If fp32 cannot hold maximum * scale, the row becomes NaN, as in plain PyTorch: by 0 * inf. The product is taken
// with ln2_hi first, as maximum_log2 may overflow where maximum * scale does not.
__device__ __forceinline__ Origin origin_at(float maximum, float scale_log2, float ln2_hi) {
    const float maximum_log2 = mul_rn(maximum, scale_log2);
    if (!is_huge(maximum, maximum_log2)) return {0.0f, maximum_log2};
    return {fmaf(0.0f, mul_rn(maximum, ln2_hi) * scale_log2, maximum), 0.0f};
}

// Tells the compiler that a condition hardly ever holds, so that it keeps the code that depends on it out of the way of the rest.
__device__ __forceinline__ bool unlikely(bool condition) { return __builtin_expect(condition, false); }

// Raises a row's origin to `maximum` if that is higher. Returns the factor that rescales the row's sum and its row of O.
__device__ __forceinline__ float move_origin(Origin& origin, float maximum, float scale_log2, float ln2_hi) {
    const bool had_no_key = origin.row_max == kInitialRowMax;
    // +inf for the first key; NaN if there is still none, with a maximum of -inf: then the origin stays.
    const float height = had_no_key ? maximum + infinity() : fmaf(maximum - origin.shift, scale_log2, -origin.row_max);
    if (!(height > 0.0f)) return 1.0f;
    const Origin before = origin;
    origin = origin_at(maximum, scale_log2, ln2_hi);
    return had_no_key ? 0.0f : ex2_approx_ftz(fmaf(before.shift - origin.shift, scale_log2, before.row_max - origin.row_max));
}

// The maximum of this lane's scores in row lane/4 + h*8. Two chains of comparisons take half the time of one.
template <int kKeyTiles>
__device__ __forceinline__ float lane_max(const float (&S)[kKeyTiles][4], int h) {
    float partial[2] = {fmaxf(S[0][h * 2], S[0][h * 2 + 1]), fmaxf(S[1][h * 2], S[1][h * 2 + 1])};
#pragma unroll
    for (int j = 2; j < kKeyTiles; ++j) partial[j % 2] = fmaxf(partial[j % 2], fmaxf(S[j][h * 2], S[j][h * 2 + 1]));
    return fmaxf(partial[0], partial[1]);
}

// Reductions over the quad of lanes that holds a row.
__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, shfl_sync_bfly(value, 1));
    return fmaxf(value, shfl_sync_bfly(value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
    value += shfl_sync_bfly(value, 1);
    return value + shfl_sync_bfly(value, 2);
}

// The factor that normalises a row of O: 1 / total, to 1 ulp, or 0 if no key is seen. `total` is 0, NaN or from about 1 to below 2^100.
// Newton's method refines a guess good to 5 %, three times: a division would bring a branch, and rcp.approx differs between GPUs.
__device__ __forceinline__ float normaliser(float total) {
    float y = __int_as_float(0x7ef311c3 - __float_as_int(total));  // negates the exponent: 254 << 23, less what makes the error least
#pragma unroll
    for (int i = 0; i < 3; ++i) y = fmaf(y, fmaf(-total, y, 1.0f), y);
    return total == 0.0f ? 0.0f : y;
}
