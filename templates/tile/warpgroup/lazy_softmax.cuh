// Online softmax in base 2 with a lazy reference: a row's probabilities are relative to a reference that an early key block gave, with no look
// at the maximum of later ones. The sum, which is needed anyway, tells when scores have outgrown it: only then is the block done again with
// a reference that follows the maximum, and what was summed before is rescaled. From there on the tile's reference follows the maximum of each
// block, so that no input costs more than one block done twice. Each warp decides by its own rows alone: results must not depend on who was first.

// How large a lane's sum over one block may get: so large may a probability get, which the element must hold. bf16 holds any; 2^72 leaves the
// fp32 output 2^41 for the values of V over 16384 such keys.
template <class Element>
__device__ __forceinline__ float sum_limit();
template <>
__device__ __forceinline__ float sum_limit<Bf16>() { return 0x1p72f; }
template <>
__device__ __forceinline__ float sum_limit<Fp16>() { return 0x1p15f; }

// The state of a thread's two rows of 16, lane/4 + h*8. The four lanes of a row hold the same reference, and each the sum over its own columns
// until `finish` adds them up.
template <class Element, bool kLazy>
struct OnlineSoftmax {
    float reference[2];       // scale_log2 * maximum of the scores when they last outgrew it, rounded
    float shift[2];           // of a row that is huge, or 0; only where `huge`
    float sum[2], lost[2];    // lost: what the additions to `sum` rounded away (Dekker 1971); over many blocks it adds up
    float factor[2];          // by which the output has to be multiplied, if it is `outgrown`
    bool outgrown;            // by the last block; the same in the whole warp
    bool redone;              // a block of this tile was, or a row of the warp is huge
    bool huge;                // a row of the warp is
    float scale_log2, natural;

    __device__ __forceinline__ OnlineSoftmax(float scale_log2, float natural) : outgrown(false), scale_log2(scale_log2), natural(natural) { restart(); }

    // A new tile begins.
    __device__ __forceinline__ void restart() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            reference[h] = kNoReference;
            shift[h] = 0.0f;
            sum[h] = lost[h] = 0.0f;
        }
        redone = huge = false;
    }

    // Lets the references follow these scores if one has outgrown them. Scores of a huge warp are shifted.
    template <int kKeyTiles>
    __device__ __forceinline__ void follow(float (&scores)[kKeyTiles][4]) {
        float maximum[2], highest[2];
        bool above = false, far = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            maximum[h] = row_maximum(lane_maximum(scores, h));
            highest[h] = mul_rn(maximum[h], scale_log2);
            above |= highest[h] - reference[h] > kHeadroom;
            far |= is_huge(maximum[h], highest[h]);
        }
        huge |= vote_sync_any(far);
        outgrown = vote_sync_any(above);
        if (unlikely(huge)) {
            follow_huge(scores, maximum);
        } else if (outgrown) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float next = fmaxf(reference[h], highest[h]);
                rescale_sum(h, ex2_approx_ftz(reference[h] - next));
                reference[h] = next;
            }
        }
    }
    template <int kKeyTiles>
    __device__ __forceinline__ void follow_huge(float (&scores)[kKeyTiles][4], const float (&maximum)[2]) {
        outgrown = redone = true;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Origin origin{shift[h], reference[h]};
            rescale_sum(h, move_origin(origin, maximum[h], scale_log2, natural));
            shift[h] = origin.shift;
            reference[h] = origin.reference;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                scores[j][h * 2] -= shift[h];
                scores[j][h * 2 + 1] -= shift[h];
            }
        }
    }
    __device__ __forceinline__ void rescale_sum(int h, float by) {
        factor[h] = by;
        const float factor_of_sum = fmaf(by, kEx2Lean, by);  // 1 for a factor of 1
        sum[h] *= factor_of_sum;
        lost[h] *= factor_of_sum;
    }

    // Probabilities of a key block, relative to the reference, as the operand of the product with V: two neighbouring column tiles of the
    // accumulator layout are one such operand, rounded to Element. Adds them to the sums. `begins`: rows may have seen no key before.
    template <int kKeyTiles>
    __device__ __forceinline__ void probabilities(u32 (&p)[kKeyTiles / 2][4], float (&scores)[kKeyTiles][4], bool begins) {
        bool follows = !kLazy || begins || redone;
        outgrown = false;
        float partial[2][2];
#pragma unroll 1
        for (;;) {  // a loop, so that the exponentials are there once
            if (follows) follow(scores);
            partial[0][0] = partial[0][1] = partial[1][0] = partial[1][1] = 0.0f;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float low = ex2_approx_ftz(fmaf(scores[j][h * 2], scale_log2, -reference[h]));
                    const float high = ex2_approx_ftz(fmaf(scores[j][h * 2 + 1], scale_log2, -reference[h]));
                    partial[h][0] += low;
                    partial[h][1] += high;
                    p[j / 2][j % 2 * 2 + h] = cvt_rn_x2<Element>(low, high);
                }
#pragma unroll
            for (int h = 0; h < 2; ++h) partial[h][0] += partial[h][1];
            if (!kLazy || follows) break;
            const bool fits = partial[0][0] < sum_limit<Element>() && partial[1][0] < sum_limit<Element>();
            if (!vote_sync_any(!fits)) break;
            follows = redone = true;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float before = sum[h];
            sum[h] = before + partial[h][0];
            lost[h] += partial[h][0] - (sum[h] - before);
        }
    }

    template <int kOutTiles>
    __device__ __forceinline__ void rescale(float (&out)[kOutTiles][4]) const {
#pragma unroll
        for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[j][e] *= factor[e / 2];
    }

    // What the output has to be multiplied with in the end, and what its log-sum-exp comes from.
    __device__ __forceinline__ RowSums finish(float (&inverse)[2]) const {
        RowSums sums;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sums.rows[h] = {row_sum(sum[h] + lost[h]), reference[h]};
            inverse[h] = normaliser(sums.rows[h].total);
            if (unlikely(huge) && shift[h] != 0.0f) sums.rows[h] = {-sums.rows[h].total, shift[h]};
        }
        return sums;
    }
};
