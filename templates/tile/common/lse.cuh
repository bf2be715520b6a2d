// The log-sum-exp of a row, from what the softmax has summed up.

// By how much ex2.approx is too small on average, relatively, for arguments from -16 to -1 (measured on sm_90). For one value that
// is nothing; it is put right where it adds up: in the sum, and in the factor that rescales the sum.
constexpr float kEx2Lean = 5.0e-8f;

// Natural logarithm of 1 + x, for x from sqrt(1/2) - 1 to sqrt(2) - 1, to 1.2 ulp: x - x^2/2 + x^3 q(x), where q makes the relative error least.
__device__ __forceinline__ float log_near_one(float x) {
    constexpr float kQ[] = {0x1.645dd8p-4f, -0x1.24326cp-3f, 0x1.31745ap-3f, -0x1.538254p-3f, 0x1.98d7f4p-3f, -0x1.000382p-2f, 0x1.5556d8p-2f, -0.5f};
    float q = kQ[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) q = fmaf(q, x, kQ[i]);
    return fmaf(mul_rn(q, x), x, x);
}

// What turns a reference into a scaled score, in two floats.
struct Unit {
    float high, low;

    // Of a reference that is a score itself, not yet scaled: the scale, which is scale_log2 * (natural + natural_low).
    __device__ __forceinline__ static Unit of_score(float scale_log2, float natural, float natural_low) {
        const float high = mul_rn(scale_log2, natural);
        return {high, fmaf(scale_log2, natural, -high) + scale_log2 * natural_low};
    }
};

// log(total) + reference * (unit.high + unit.low), to about one rounding. fp32 needs some care for that: the two terms are taken
// apart into what is rounded once, in the end, and small corrections. `total` is finite and > 0, or NaN.
__device__ __forceinline__ float log_sum_exp(float reference, float total, const Unit& unit) {
    constexpr float kLn2 = 0.693147182f, kLn2Low = -1.90465430e-9f;
    // total = fraction * 2^exponent, with a fraction from sqrt(1/2) to sqrt(2).
    const int power = (__float_as_int(total) - __float_as_int(0.70710678f)) >> 23;
    const float exponent = static_cast<float>(power), fraction = __int_as_float(__float_as_int(total) - (power << 23));
    const float inverse = (2.0f - fraction) * __int_as_float((127 - power) << 23);  // of total, to 20 %, and exactly 1 for 1
    const float a = mul_rn(reference, unit.high), b = mul_rn(exponent, kLn2);
    const float sum = a + b, b_in_sum = sum - a;
    const float lost_in_sum = (a - (sum - b_in_sum)) + (b - b_in_sum);  // exactly (Knuth's TwoSum)
    const float lost_in_products = fmaf(reference, unit.high, -a) + fmaf(exponent, kLn2, -b);
    const float low_parts = reference * unit.low + exponent * kLn2Low;
    const float lean = kEx2Lean * (1.0f - inverse);  // the 2^0 = 1 of the score that became the reference is exact
    const float corrections = lost_in_sum + lost_in_products + low_parts + lean;
    return sum + (log_near_one(fraction - 1.0f) + fmaf(0.0f, total, corrections));  // 0 * NaN: the bits taken apart look like a number
}

// The log-sum-exp of a row's scaled scores. natural + natural_low is scale / scale_log2, about ln 2. A row that saw no key gets -inf.
__device__ __forceinline__ float log_sum_exp(const Origin& origin, float total, float scale_log2, float natural, float natural_low) {
    const bool huge = origin.shift != 0.0f;
    const Unit unit = huge ? Unit::of_score(scale_log2, natural, natural_low) : Unit{natural, natural_low};
    const float value = log_sum_exp(huge ? origin.shift : origin.reference, total, unit);
    return total == 0.0f ? -infinity() : value;
}
