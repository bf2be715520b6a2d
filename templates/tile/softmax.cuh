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

// The state of a warp's rows. [i][h] belongs to row i*16 + h*8 + lane/4; the four lanes of a row hold the same reference,
// and each the sum over its own columns until `finish` adds them up.
template <int kRowTiles, int kThreads>
struct OnlineSoftmax {
    static constexpr int kBytes = kRowTiles * kThreads * 16;
    float reference[kRowTiles][2];  // scale_log2 * maximum of the scores when they last outgrew it, rounded
    float partial[kRowTiles][2];    // sums of exp2(scale_log2 * score - reference) since the last `add_partial`
    SharedAddress sums;             // this thread's place for the sums of row tile 0; those of the others follow
    float scale_log2;

    // `memory` is kBytes of shared memory.
    __device__ __forceinline__ OnlineSoftmax(float scale_log2, SharedAddress memory)
        : sums(memory + thread_index() * 16), scale_log2(scale_log2) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                reference[i][h] = kNoReference;
                partial[i][h] = 0.0f;
            }
            RowSums{}.store(place(i));
        }
    }

    __device__ __forceinline__ SharedAddress place(int row_tile) const { return sums + row_tile * kThreads * 16; }

    // Whether a score of this warp exceeds what its row's reference allows for.
    template <int kKeyTiles>
    __device__ __forceinline__ bool outgrown_by(const float (&scores)[kRowTiles][kKeyTiles][4]) const {
        bool any = false;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) any |= fmaf(lane_maximum(scores[i], h), scale_log2, -reference[i][h]) > kHeadroom;
        return vote_sync_any(any);
    }

    // The reference that row [i][h] gets from these scores, which are exchanged between its lanes: never lower than it was.
    template <int kKeyTiles>
    __device__ __forceinline__ float next_reference(const float (&scores)[kRowTiles][kKeyTiles][4], int i, int h) const {
        return fmaxf(reference[i][h], mul_rn(row_maximum(lane_maximum(scores[i], h)), scale_log2));
    }

    // Takes the first scores for the reference.
    template <int kKeyTiles>
    __device__ __forceinline__ void start(const float (&scores)[kRowTiles][kKeyTiles][4]) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) reference[i][h] = next_reference(scores, i, h);
    }

    // Lets the references follow these scores, and rescales what was summed before.
    template <int kKeyTiles, int kOutTiles>
    __device__ __forceinline__ void rescale(const float (&scores)[kRowTiles][kKeyTiles][4], float (&out)[kRowTiles][kOutTiles][4]) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            RowSums row = RowSums::load(place(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float before = reference[i][h];
                reference[i][h] = next_reference(scores, i, h);
                const float factor = ex2_approx_ftz(before - reference[i][h]);
                const float factor_of_sum = fmaf(factor, kEx2Lean, factor);  // 1 for a factor of 1
                partial[i][h] *= factor_of_sum;
                row.sum[h] *= factor_of_sum;
                row.lost[h] *= factor_of_sum;
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) out[i][j][e] *= factor;
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
    __device__ __forceinline__ float finish(float (&out)[kRowTiles][kOutTiles][4], float natural, float natural_low) {
        add_partial();
        const int own = lane_index() % (kRowTiles * 2);
        float own_total = 0.0f, own_reference = 0.0f;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const RowSums row = RowSums::load(place(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float total = row_sum(row.sum[h] + row.lost[h]), inverse = normaliser(total);
                if (own == i * 2 + h) {
                    own_total = total;
                    own_reference = reference[i][h];
                }
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) out[i][j][e] *= inverse;
            }
        }
        return own_total == 0.0f ? -infinity() : log_sum_exp(own_reference, own_total, natural, natural_low);
    }
};
