// The log-sum-exp of a row, from its row max and row sum.

// Mean relative error of ex2.approx, whose results are too small (measured on sm_90 for arguments from -16 to -1, assumed everywhere). lse
// is corrected twice: the factor that rescales a row sum is raised by it, and log_sum_exp raises the sum's terms. O is not: the error of P
// cancels in O / row_sum, and 5e-8 a rescale does not show in 16 bits.
constexpr float kEx2Bias = 5.0e-8f;

// Natural logarithm of 1 + x as x + x^2 q(x), to 1.2 ulp, for x from sqrt(1/2) - 1 to sqrt(2) - 1. q is the polynomial with q(0) = -1/2
// that makes the largest relative error least.
__device__ __forceinline__ float log_near_one(float x) {
    constexpr float kQ[] = {0x1.645dd8p-4f, -0x1.24326cp-3f, 0x1.31745ap-3f,  -0x1.538254p-3f,
                            0x1.98d7f4p-3f, -0x1.000382p-2f, 0x1.5556d8p-2f, -0.5f};
    float q = kQ[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) q = fmaf(q, x, kQ[i]);
    return fmaf(mul_rn(q, x), x, x);
}

// The factor from a row max to the units of softmax_scale * S, in two floats: row_max * (high + low). Usually row_max is in base 2, and the
// factor is ln2_hi + ln2_lo; in a huge row it is a score without the scale, and the factor is the softmax scale.
struct RowMaxFactor {
    float high, low;

    // For a row max that is a score itself, without the scale: the softmax scale, scale_log2 * (ln2_hi + ln2_lo).
    __device__ __forceinline__ static RowMaxFactor of_score(float scale_log2, float ln2_hi, float ln2_lo) {
        const float high = mul_rn(scale_log2, ln2_hi);
        return {high, fmaf(scale_log2, ln2_hi, -high) + scale_log2 * ln2_lo};
    }
};

// log(total) + row_max * (factor.high + factor.low), to about one rounding. fp32 takes some care for that: each term is split into a main
// part and a small correction, and the sum is rounded once. `total` is finite and > 0, or NaN; for 0 the result means nothing.
__device__ __forceinline__ float log_sum_exp(float row_max, float total, const RowMaxFactor& factor) {
    constexpr float kLn2 = 0.693147182f, kLn2Low = -1.90465430e-9f;
    // total = fraction * 2^exponent, with a fraction from sqrt(1/2) to sqrt(2).
    const int power = (__float_as_int(total) - __float_as_int(0.70710678f)) >> 23;
    const float exponent = static_cast<float>(power), fraction = __int_as_float(__float_as_int(total) - power * 0x800000);
    const float inverse = (2.0f - fraction) * __int_as_float((127 - power) * 0x800000);  // of total, to 20 %, and exactly 1 for 1
    const float a = mul_rn(row_max, factor.high), b = mul_rn(exponent, kLn2);
    const float s = a + b, b_in_s = s - a;
    const float sum_error = (a - (s - b_in_s)) + (b - b_in_s);  // exactly (Knuth's TwoSum)
    const float product_error = fmaf(row_max, factor.high, -a) + fmaf(exponent, kLn2, -b);
    const float low_parts = row_max * factor.low + exponent * kLn2Low;
    // The term of the score that set row_max, 1 / total of the sum, is 2^0 or nearly so, and has no error.
//% if folds or linear
    const float bias = kEx2Bias * (1.0f - fminf(inverse, 1.0f));  // a sum may be far below 1: of small scores, whose row max is 0, or of
                                                                  // a row that shares the row max of another
//% else
    const float bias = kEx2Bias * (1.0f - inverse);
//% endif
    const float corrections = sum_error + product_error + low_parts + bias;
    // 0 * total carries on a NaN, which the arithmetic on total's bits has lost.
    return s + (log_near_one(fraction - 1.0f) + fmaf(0.0f, total, corrections));
}

// The log-sum-exp of a row of softmax_scale * S. ln2_hi + ln2_lo is scale / scale_log2, about ln 2. A row that saw no key gets -inf.
__device__ __forceinline__ float log_sum_exp(const Origin& origin, float total, float scale_log2, float ln2_hi, float ln2_lo) {
    const bool huge = origin.shift != 0.0f;
    const RowMaxFactor factor = huge ? RowMaxFactor::of_score(scale_log2, ln2_hi, ln2_lo) : RowMaxFactor{ln2_hi, ln2_lo};
    const float value = log_sum_exp(huge ? origin.shift : origin.row_max, total, factor);
    return total == 0.0f ? -infinity() : value;
}
