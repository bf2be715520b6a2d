// What every form of the online softmax needs of a row, whose scores four neighbouring lanes hold.

// How far above its reference a score may lie before a reference that follows the maximum does so: fp16 still holds a probability of 2^8.
constexpr float kHeadroom = 8.0f;

// The reference of a row that has seen no key yet: its scores are all -inf, and -inf - (-inf) would be NaN. Any finite score outgrows it.
constexpr float kNoReference = -3.0e38f;

// One fused multiply-add computes the exponent of a score S, S * scale_log2 - reference, where the reference is the scaled maximum, rounded. The
// larger the maximum, the more that rounding is worth, in the end more than all the range of an exponent. So the scores of a huge row are first
// shifted by the maximum itself: its exponent is (S - shift) * scale_log2. Other rows have a shift of 0, and huge ones a reference of 0.
struct Origin {
    float shift, reference;
};

// Scaled maxima from here on are huge. Below, rounding one changes an exponent by at most 2^-12: the maximum's own probability still rounds to 1 in fp16.
constexpr float kHuge = 0x1p13f;

// Whether a maximum is huge. That of a row that sees no key, -inf, is not.
__device__ __forceinline__ bool is_huge(float maximum, float scaled) { return !(fabsf(scaled) < kHuge) && maximum > -infinity(); }

// The origin for a maximum. One that fp32 cannot hold once it is scaled makes the row NaN, as in plain PyTorch.
__device__ __forceinline__ Origin origin_at(float maximum, float scale_log2, float natural) {
    const float scaled = mul_rn(maximum, scale_log2);
    if (!is_huge(maximum, scaled)) return {0.0f, scaled};
    return {fmaf(0.0f, mul_rn(maximum, natural) * scale_log2, maximum), 0.0f};  // 0 * inf is NaN
}

// Says that a condition hardly ever holds: what depends on it then lies apart from the code that is run all the time, and costs that nothing.
__device__ __forceinline__ bool unlikely(bool condition) { return __builtin_expect(condition, false); }

// Moves a row's origin to `maximum` if that lies above it. Returns by what the row's sums and output have to be multiplied.
__device__ __forceinline__ float move_origin(Origin& origin, float maximum, float scale_log2, float natural) {
    const bool unseen = origin.reference == kNoReference;
    const float height = unseen ? maximum + infinity() : fmaf(maximum - origin.shift, scale_log2, -origin.reference);
    if (!(height > 0.0f)) return 1.0f;
    const Origin before = origin;
    origin = origin_at(maximum, scale_log2, natural);
    return unseen ? 0.0f : ex2_approx_ftz(fmaf(before.shift - origin.shift, scale_log2, before.reference - origin.reference));
}

// The highest of this lane's scores of row lane/4 + h*8. In two chains: one would be twice as long.
template <int kKeyTiles>
__device__ __forceinline__ float lane_maximum(const float (&scores)[kKeyTiles][4], int h) {
    float chain[2] = {fmaxf(scores[0][h * 2], scores[0][h * 2 + 1]), fmaxf(scores[1][h * 2], scores[1][h * 2 + 1])};
#pragma unroll
    for (int j = 2; j < kKeyTiles; ++j) chain[j % 2] = fmaxf(chain[j % 2], fmaxf(scores[j][h * 2], scores[j][h * 2 + 1]));
    return fmaxf(chain[0], chain[1]);
}

// Of the four lanes' values, the highest, and the sum.
__device__ __forceinline__ float row_maximum(float value) {
    value = fmaxf(value, shfl_sync_bfly(value, 1));
    return fmaxf(value, shfl_sync_bfly(value, 2));
}
__device__ __forceinline__ float row_sum(float value) {
    value += shfl_sync_bfly(value, 1);
    return value + shfl_sync_bfly(value, 2);
}

// What a row's output is multiplied with in the end: 1 / total, to 1 ulp; 0 for a row that saw no key. A guess that is good to 5 %, and Newton's
// method three times: a division would bring a branch, and rcp.approx differ from machine to machine.
__device__ __forceinline__ float normaliser(float total) {
    float y = __int_as_float(0x7ef311c3 - __float_as_int(total));
#pragma unroll
    for (int i = 0; i < 3; ++i) y = fmaf(y, fmaf(-total, y, 1.0f), y);
    return total == 0.0f ? 0.0f : y;
}
