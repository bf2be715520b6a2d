// Online softmax in base 2: Milakov and Gimelshein 2018, in the form of FlashAttention-2, algorithm 1, with one change: a row's
// reference follows its maximum only when that has outgrown it by 2^kHeadroom. Rescaling is rare then, and the usual step needs
// neither the exact maximum nor an exchange between lanes.

// Sums of one lane over its columns of a row tile: of rows lane/4 and lane/4 + 8. They change once a tile, and wait in shared memory
// until then: registers are what limits the tiles.
struct RowSums {
    float sum[2], lost[2];  // lost: what the additions to `sum` rounded away (Dekker 1971); over many tiles it adds up

    __device__ __forceinline__ static RowSums load(SharedAddress place) {
        const uint4 v = load_shared_v4(place);
        return {{__uint_as_float(v.x), __uint_as_float(v.y)}, {__uint_as_float(v.z), __uint_as_float(v.w)}};
    }
    __device__ __forceinline__ void store(SharedAddress place) const {
        store_shared_v4(place, {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(lost[0]), __float_as_uint(lost[1])});
    }
};

// The state of a warp's rows. [i][h] belongs to row i*16 + h*8 + lane/4; the four lanes of a row hold the same origin,
// and each the sum over its own columns until `finish` adds them up.
template <int kRowTiles, int kThreads>
struct OnlineSoftmax {
    static constexpr int kBytes = kRowTiles * kThreads * 16;
    float reference[kRowTiles][2];  // scale_log2 * maximum of the scores when they last outgrew it, rounded
    float shift[kRowTiles][2];      // of a row that is huge, or 0; only where `huge`
    float partial[kRowTiles][2];    // sums of exp2(scale_log2 * (score - shift) - reference) since the last `add_partial`
    bool huge;                      // a row of the warp is
    SharedAddress sums;             // this thread's place for the sums of row tile 0; those of the others follow
    float scale_log2, natural;

    // `memory` is kBytes of shared memory.
    __device__ __forceinline__ OnlineSoftmax(float scale_log2, float natural, SharedAddress memory)
        : huge(false), sums(memory + thread_index() * 16), scale_log2(scale_log2), natural(natural) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                reference[i][h] = kNoReference;
                shift[i][h] = 0.0f;
                partial[i][h] = 0.0f;
            }
            RowSums{}.store(place(i));
        }
    }

    __device__ __forceinline__ SharedAddress place(int row_tile) const { return sums + row_tile * kThreads * 16; }

    // Whether a score of this warp exceeds what its row's reference allows for. `masked`: rows may see their first key, however low its score.
    template <int kKeyTiles>
    __device__ __forceinline__ bool outgrown_by(const float (&scores)[kRowTiles][kKeyTiles][4], bool masked) const {
        bool any = huge;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float maximum = lane_maximum(scores[i], h);
                any |= fmaf(maximum, scale_log2, -reference[i][h]) > kHeadroom;
                if (masked) any |= is_huge(maximum, maximum * scale_log2);
            }
        return vote_sync_any(any);
    }

    // Lets the references follow these scores, never down. `factor`: what sums and outputs have to be multiplied with. Scores of a huge warp are
    // shifted.
    template <int kKeyTiles>
    __device__ __forceinline__ void follow(float (&scores)[kRowTiles][kKeyTiles][4], float (&factor)[kRowTiles][2]) {
        float maximum[kRowTiles][2];
        bool far = false;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                maximum[i][h] = row_maximum(lane_maximum(scores[i], h));
                far |= is_huge(maximum[i][h], mul_rn(maximum[i][h], scale_log2));
            }
        huge |= vote_sync_any(far);
        if (unlikely(huge)) {
            follow_huge(scores, maximum, factor);
        } else {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float next = fmaxf(reference[i][h], mul_rn(maximum[i][h], scale_log2));
                    factor[i][h] = ex2_approx_ftz(reference[i][h] - next);
                    reference[i][h] = next;
                }
        }
    }
    template <int kKeyTiles>
    __device__ __forceinline__ void follow_huge(float (&scores)[kRowTiles][kKeyTiles][4], const float (&maximum)[kRowTiles][2],
                                                float (&factor)[kRowTiles][2]) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                Origin origin{shift[i][h], reference[i][h]};
                factor[i][h] = move_origin(origin, maximum[i][h], scale_log2, natural);
                shift[i][h] = origin.shift;
                reference[i][h] = origin.reference;
#pragma unroll
                for (int j = 0; j < kKeyTiles; ++j) {
                    scores[i][j][h * 2] -= shift[i][h];
                    scores[i][j][h * 2 + 1] -= shift[i][h];
                }
            }
    }

    // Takes the first scores for the reference.
    template <int kKeyTiles>
    __device__ __forceinline__ void start(float (&scores)[kRowTiles][kKeyTiles][4]) {
        float factor[kRowTiles][2];
        follow(scores, factor);
    }

    // Lets the references follow these scores, and rescales what was summed before.
    template <int kKeyTiles, int kOutTiles>
    __device__ __forceinline__ void rescale(float (&scores)[kRowTiles][kKeyTiles][4], float (&out)[kRowTiles][kOutTiles][4]) {
        float factor[kRowTiles][2];
        follow(scores, factor);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            RowSums row = RowSums::load(place(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float factor_of_sum = fmaf(factor[i][h], kEx2Lean, factor[i][h]);  // 1 for a factor of 1
                partial[i][h] *= factor_of_sum;
                row.sum[h] *= factor_of_sum;
                row.lost[h] *= factor_of_sum;
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) out[i][j][e] *= factor[i][h];
            }
            row.store(place(i));
        }
    }

    // Probabilities of a chunk of 16 keys, relative to the reference, as the operand of the product with V: two neighbouring column tiles of
    // the accumulator layout are one such operand, rounded to Element. Adds them to the partial sums.
    template <class Element, int kKeyTiles>
    __device__ __forceinline__ void probabilities(u32 (&p)[kRowTiles][4], const float (&scores)[kRowTiles][kKeyTiles][4], int chunk) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float* pair = scores[i][chunk * 2 + e / 2] + e % 2 * 2;
                const float low = ex2_approx_ftz(fmaf(pair[0], scale_log2, -reference[i][e % 2]));
                const float high = ex2_approx_ftz(fmaf(pair[1], scale_log2, -reference[i][e % 2]));
                partial[i][e % 2] += low;
                partial[i][e % 2] += high;
                p[i][e] = cvt_rn_x2<Element>(low, high);
            }
    }

    // Moves the partial sums to those in shared memory.
    __device__ __forceinline__ void add_partial() {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            RowSums row = RowSums::load(place(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float before = row.sum[h];
                row.sum[h] = before + partial[i][h];
                row.lost[h] += partial[i][h] - (row.sum[h] - before);
                partial[i][h] = 0.0f;
            }
            row.store(place(i));
        }
    }

    // Normalises the output, and returns the natural log-sum-exp of the scaled scores of one row: lane t of a row's four computes that of
    // row [t / 2][t % 2], as far as there is one. natural + natural_low turns a reference into a scaled score: scale / scale_log2,
    // about ln 2. A row that saw no key gets 0 and -inf.
    template <int kOutTiles>
    __device__ __forceinline__ float finish(float (&out)[kRowTiles][kOutTiles][4], float natural_low) {
        add_partial();
        const int own = lane_index() % (kRowTiles * 2);
        float own_total = 0.0f;
        Origin own_origin{};
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const RowSums row = RowSums::load(place(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float total = row_sum(row.sum[h] + row.lost[h]), inverse = normaliser(total);
                if (own == i * 2 + h) {
                    own_total = total;
                    own_origin = {shift[i][h], reference[i][h]};
                }
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) out[i][j][e] *= inverse;
            }
        }
        return log_sum_exp(own_origin, own_total, scale_log2, natural, natural_low);
    }
};
