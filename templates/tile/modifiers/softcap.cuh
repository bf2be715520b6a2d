// The softcap as a link of the chain: S becomes tanh(softmax scale * S / cap), in units of the cap.
//
// tanh.approx errs by up to 2^-11, which at a cap of 50 is 0.02 of a score. Here the error is 2^-22 of each result. Most scores are small
// beside their cap: if all of a warp are, an odd polynomial does without the special function unit, which softmax keeps busy.

struct Softcap : HidesNothing<Softcap> {
    static constexpr bool kMapsScores = true;
    static constexpr float kReach = 0.75f;  // the polynomial is for arguments x of tanh up to this: for |z| < 2, where z = x * 2 / kReach
    float step;                             // from S to z
    // Small scores are those with |y| < reach, where y = unit * S: the base-2 exponent is y * ((y^2 + inner)^2 + outer), to about 2^-23.
    float unit, minus_reach2, inner, outer;
    float step_of_unit;         // from y to z
    float least_sum, most_sum;  // see small_sums

    template <class Parameters>
    __device__ __forceinline__ static Softcap of(const Parameters& p, int, int) {
        return {{},
                p.softcap_step,
                p.softcap_unit,
                p.softcap_minus_reach2,
                p.softcap_inner,
                p.softcap_outer,
                p.softcap_step_of_unit,
                p.softcap_least_sum,
                p.softcap_most_sum};
    }

    // Whether some |z| >= 2, or is not a number, given the bits of all of them, ored: the exponents of these alone have the highest bit.
    __device__ __forceinline__ static bool is_large(u32 bits) { return (bits & 0x40000000) != 0; }

    // tanh of a small argument as z q(z^2). Of those that begin with 3/8, q makes the largest relative error least, 1.1 * 2^-25, to either
    // side: errors of one sign would add up in the log-sum-exp of many scores that are alike.
    __device__ __forceinline__ static float tanh_of_small(float z) {
        constexpr float kQ[] = {-0x1.a67272p-24f, 0x1.83102ep-19f, -0x1.d30ec6p-15f, 0x1.03114cp-10f, -0x1.1fff6ap-6f, 0x1.8p-2f};
        const float square = z * z;
        float q = kQ[0];
#pragma unroll
        for (int i = 1; i < 6; ++i) q = fmaf(q, square, kQ[i]);
        return z * q;
    }
    // tanh x = 1 - 2 / (1 + e^2x). Where x is small, 1 and the quotient have nearly the same value, and their difference a large error.
    __device__ __forceinline__ static float tanh_of(float z) {
        const float t = fmaf(-2.0f, rcp_approx_ftz(1.0f + ex2_approx_ftz(z * (kReach * 1.44269504f))), 1.0f);
        return fabsf(z) < 2.0f ? tanh_of_small(z) : t;
    }

    template <class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ void change(float (&S)[kRowTiles][kTiles][4], const Position&) const {
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    S[i][j][e] *= step;
                    bits |= __float_as_uint(S[i][j][e]);
                }
        if (!vote_sync_any(is_large(bits))) {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
                for (int j = 0; j < kTiles; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) S[i][j][e] = tanh_of_small(S[i][j][e]);
            return;
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) change_large(S[i]);
    }
    // Of any arguments of tanh, times `by`.
    template <int kTiles>
    __device__ __forceinline__ static void change_large(float (&S)[kTiles][4], float by = 1.0f) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {  // four scores after the other four: all at once would need more registers
            u32 four[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) four[e] = __float_as_uint(S[j][e] * by), launder(four[e]);
#pragma unroll
            for (int e = 0; e < 4; ++e) four[e] = __float_as_uint(tanh_of(__uint_as_float(four[e])));
#pragma unroll
            for (int e = 0; e < 4; ++e) launder(four[e]), S[j][e] = __uint_as_float(four[e]);
        }
    }
    // For those that make the map of small scores a part of the exponential: changes all of a warp's y, unless all are small.
    template <int kTiles>
    __device__ __forceinline__ bool change_unless_small(float (&y)[kTiles][4]) const {
        u32 all_small = 0x80000000;  // the highest bit of y^2 - reach^2, which is set if the score is small, and not if it is no number
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) all_small &= __float_as_uint(fmaf(y[j][e], y[j][e], minus_reach2));
        const bool small = !vote_sync_any(all_small == 0);
        if (!small) change_large(y, step_of_unit);
        return small;
    }
    // Rises with y, even where the score is not small.
    __device__ __forceinline__ float small_log2(float y, float row_max) const {
        const float v = fmaf(y, y, inner);
        return fmaf(y, fmaf(v, v, outer), -row_max);
    }
    // Whether scores whose |y| is at most so much are small.
    __device__ __forceinline__ bool small_up_to(float y) const { return fmaf(y, y, minus_reach2) < 0.0f; }
    // P of scores below all small ones are too low, together by less than 2^-22 of a sum if others make that so high. From 1 on log_sum_exp
    // takes row sums.
    __device__ __forceinline__ SmallSums small_sums() const { return {least_sum, most_sum}; }

    __device__ __forceinline__ float changed(float s, int, int) const { return tanh_of(s * step); }
    // Of the score of a hidden key, which is -inf, too.
    __device__ __forceinline__ float derivative(float changed) const { return fmaxf(fmaf(-changed, changed, 1.0f), 0.0f); }
};
