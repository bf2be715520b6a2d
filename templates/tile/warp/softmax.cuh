// Online softmax in base 2 (Milakov and Gimelshein 2018) as in FlashAttention-2, algorithm 1, with conditional rescaling: the row max stays
// as it is until a score exceeds it by kHeadroom. So the usual step needs neither the exact maximum nor an exchange between lanes.

// One lane's sums over its columns of a row tile, for the rows lane/4 and lane/4 + 8. They change once a tile and where a row
// max does, and stay in shared memory in between, because registers limit the tile sizes.
struct LaneSums {
    // compensation: what the additions to row_sum rounded away, exactly where row_sum >= the addend (Dekker 1971)
    float row_sum[2], compensation[2];

    __device__ __forceinline__ static LaneSums load(SharedAddress slot) {
        const uint4 v = load_shared_v4(slot);
        return {{__uint_as_float(v.x), __uint_as_float(v.y)}, {__uint_as_float(v.z), __uint_as_float(v.w)}};
    }
    __device__ __forceinline__ void store(SharedAddress slot) const {
        store_shared_v4(slot, {__float_as_uint(row_sum[0]), __float_as_uint(row_sum[1]), __float_as_uint(compensation[0]),
                               __float_as_uint(compensation[1])});
    }
};

// The statistics of a warp's rows. [i][h] belongs to row i*16 + h*8 + lane/4. The quad of lanes that holds a row has the same row max; each
// lane sums its own columns, and `finish` adds the four sums up.
template <int kRowTiles, int kThreads>
struct OnlineSoftmax {
    static constexpr int kBytes = kRowTiles * kThreads * 16;
    static_assert(kRowTiles <= 2, "in `finish` each lane of a quad has one row");
    float row_max[kRowTiles][2];  // scale_log2 * the maximum of S when it was last updated, rounded
    float shift[kRowTiles][2];    // see Origin; valid if `huge`
    float partial[kRowTiles][2];  // row sums of P since the last add_partial
    bool huge;                    // a row of the warp is huge
    SharedAddress slots;          // this thread's LaneSums of row tile 0; those of the others follow
    float scale_log2, ln2_hi;     // ln2_hi: for origin_at alone

    // `memory` is kBytes of shared memory.
    __device__ __forceinline__ OnlineSoftmax(float scale_log2, float ln2_hi, SharedAddress memory)
        : huge(false), slots(memory + thread_index() * 16), scale_log2(scale_log2), ln2_hi(ln2_hi) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                row_max[i][h] = kInitialRowMax;
                shift[i][h] = 0.0f;
                partial[i][h] = 0.0f;
            }
            LaneSums{}.store(slot(i));
        }
    }

    __device__ __forceinline__ SharedAddress slot(int row_tile) const { return slots + row_tile * kThreads * 16; }

    // Whether a score of this warp exceeds its row max by more than kHeadroom. `masked`: looks for huge rows,
    // too, as a row may meet the first key that it sees, and a huge one below zero exceeds nothing.
    template <int kKeyTiles>
    __device__ __forceinline__ bool needs_rescale(const float (&S)[kRowTiles][kKeyTiles][4], bool masked) const {
        bool any = huge;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float maximum = lane_max(S[i], h);
                any |= fmaf(maximum, scale_log2, -row_max[i][h]) > kHeadroom;
                if (masked) any |= is_huge(maximum, maximum * scale_log2);
            }
        return vote_sync_any(any);
    }

    // Raises the row max to that of S, never lowers it. `factor` then rescales row sums and O. In a warp with huge rows S is shifted.
    template <int kKeyTiles>
    __device__ __forceinline__ void update_row_max(float (&S)[kRowTiles][kKeyTiles][4], float (&factor)[kRowTiles][2]) {
        float maximum[kRowTiles][2];
        bool any_huge = false;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                maximum[i][h] = quad_max(lane_max(S[i], h));
                any_huge |= is_huge(maximum[i][h], mul_rn(maximum[i][h], scale_log2));
            }
        huge |= vote_sync_any(any_huge);
        if (unlikely(huge)) {
            update_huge_row_max(S, maximum, factor);
        } else {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float next = fmaxf(row_max[i][h], mul_rn(maximum[i][h], scale_log2));
                    factor[i][h] = ex2_approx_ftz(row_max[i][h] - next);
                    row_max[i][h] = next;
                }
        }
    }
    template <int kKeyTiles>
    __device__ __forceinline__ void update_huge_row_max(float (&S)[kRowTiles][kKeyTiles][4], const float (&maximum)[kRowTiles][2],
                                                float (&factor)[kRowTiles][2]) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                Origin origin{shift[i][h], row_max[i][h]};
                factor[i][h] = move_origin(origin, maximum[i][h], scale_log2, ln2_hi);
                shift[i][h] = origin.shift;
                row_max[i][h] = origin.row_max;
#pragma unroll
                for (int j = 0; j < kKeyTiles; ++j) {
                    S[i][j][h * 2] -= shift[i][h];
                    S[i][j][h * 2 + 1] -= shift[i][h];
                }
            }
    }

    // The row max of the first S.
    template <int kKeyTiles>
    __device__ __forceinline__ void start(float (&S)[kRowTiles][kKeyTiles][4]) {
        float factor[kRowTiles][2];
        update_row_max(S, factor);
    }

    // Updates the row max, and rescales row sums and O.
    template <int kKeyTiles, int kOutTiles>
    __device__ __forceinline__ void rescale(float (&S)[kRowTiles][kKeyTiles][4], float (&O)[kRowTiles][kOutTiles][4]) {
        float factor[kRowTiles][2];
        update_row_max(S, factor);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            LaneSums row = LaneSums::load(slot(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float factor_of_sum = fmaf(factor[i][h], kEx2Bias, factor[i][h]);  // 1 stays 1
                partial[i][h] *= factor_of_sum;
                row.row_sum[h] *= factor_of_sum;
                row.compensation[h] *= factor_of_sum;
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) O[i][j][e] *= factor[i][h];
            }
            row.store(slot(i));
        }
    }

    // P = exp2(S * scale_log2 - row_max) of a slice of 16 keys, rounded to Element, as the operand of P V: two neighbouring column tiles of
    // the accumulator layout make one operand. Adds P to the partial sums.
    template <class Element, int kKeyTiles>
    __device__ __forceinline__ void exp2_and_sum(u32 (&P)[kRowTiles][4], const float (&S)[kRowTiles][kKeyTiles][4], int slice) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float* pair = S[i][slice * 2 + e / 2] + e % 2 * 2;
                const float low = ex2_approx_ftz(fmaf(pair[0], scale_log2, -row_max[i][e % 2]));
                const float high = ex2_approx_ftz(fmaf(pair[1], scale_log2, -row_max[i][e % 2]));
                partial[i][e % 2] += low;
                partial[i][e % 2] += high;
                P[i][e] = cvt_rn_x2<Element>(low, high);
            }
    }

    // Adds the partial sums to those in shared memory.
    __device__ __forceinline__ void add_partial() {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            LaneSums row = LaneSums::load(slot(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float before = row.row_sum[h];
                row.row_sum[h] = before + partial[i][h];
                row.compensation[h] += partial[i][h] - (row.row_sum[h] - before);
                partial[i][h] = 0.0f;
            }
            row.store(slot(i));
        }
    }

    // Normalises O, and returns lse of one row: lane t of a quad computes that of row [t / 2][t % 2], if there is one. ln2_hi + ln2_lo is
    // scale / scale_log2, about ln 2. A row that sees no key gets O = 0 and lse = -inf.
//% if joins
    // With a sink lse of such a row is the sink.
    template <int kOutTiles>
    __device__ __forceinline__ float finish(float (&O)[kRowTiles][kOutTiles][4], float ln2_lo, float sink, float unit) {
//% else
    template <int kOutTiles>
    __device__ __forceinline__ float finish(float (&O)[kRowTiles][kOutTiles][4], float ln2_lo) {
//% endif
        add_partial();
        const int own = lane_index() % (kRowTiles * 2);
        float own_total = 0.0f;
        Origin own_origin{};
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const LaneSums row = LaneSums::load(slot(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
//% if joins
                const float total = quad_sum(row.row_sum[h] + row.compensation[h]);
                const float height = height_of_sink(sink, {shift[i][h], row_max[i][h]}, unit, ln2_hi, ln2_lo);
                const float inverse = normaliser_with_sink(total, height);
//% else
                const float total = quad_sum(row.row_sum[h] + row.compensation[h]), inverse = normaliser(total);
//% endif
                if (own == i * 2 + h) own_total = total, own_origin = {shift[i][h], row_max[i][h]};
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) O[i][j][e] *= inverse;
            }
        }
        if (own_origin.shift == 0.0f) settle(own_origin.row_max, own_total);
//% if joins
        return lse_with_sink(log_sum_exp(own_origin, own_total, scale_log2, ln2_hi, ln2_lo), sink);
//% else
        return log_sum_exp(own_origin, own_total, scale_log2, ln2_hi, ln2_lo);
//% endif
    }
};
