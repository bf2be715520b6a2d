// The log-sum-exp of a row, from what the softmax has summed up.

// By how much ex2.approx is too small on average, relatively, for arguments from -16 to -1 (measured on sm_90). For one value that
// is nothing; it is put right where it adds up: in the sum, and in the factor that rescales the sum.
constexpr float kEx2Lean = 5.0e-8f;

// log(total) + reference * (natural + natural_low), to about one rounding. fp32 needs some care for that: the two terms are taken
// apart into what is rounded once, in the end, and small corrections. `total` is finite and > 0, or NaN.
__device__ __forceinline__ float log_sum_exp(float reference, float total, float natural, float natural_low) {
    constexpr float kLn2 = 0.693147182f, kLn2Low = -1.90465430e-9f;
    // total = fraction * 2^exponent, with a fraction from 1 to 2 whose logarithm is small.
    const int biased = __float_as_int(total) >> 23;
    const float exponent = static_cast<float>(biased - 127), fraction = total * __int_as_float((254 - biased) << 23);
    const float a = mul_rn(reference, natural), b = mul_rn(exponent, kLn2);
    const float sum = a + b, b_in_sum = sum - a;
    const float lost_in_sum = (a - (sum - b_in_sum)) + (b - b_in_sum);  // exactly (Knuth's TwoSum)
    const float lost_in_products = fmaf(reference, natural, -a) + fmaf(exponent, kLn2, -b);
    const float low_parts = reference * natural_low + exponent * kLn2Low;
    const float lean = kEx2Lean * (1.0f - rcp_approx_ftz(total));  // the 2^0 = 1 of the score that became the reference is exact
    return sum + (natural_log(fraction) + (lost_in_sum + lost_in_products + low_parts + lean));
}
