// Softmax over a warp's rows, as the papers write it down: each step takes the exact row max, and registers hold the statistics.

// [i][h] belongs to row i*16 + h*8 + lane/4, and is the same in the four lanes that hold the row. With kSumsOfLanes each sums its columns.
template <int kRowTiles, bool kSumsOfLanes = false>
struct SoftmaxRows {
    Origin origin[kRowTiles][2];                             // of the exponents: the row max
    float row_sum[kRowTiles][2], compensation[kRowTiles][2];  // compensation: what additions to row_sum rounded away (Dekker 1971)
    bool huge;                                               // a row of the warp was huge when the row max was last updated: see Origin

    __device__ __forceinline__ SoftmaxRows() : huge(false) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) origin[i][h] = {0.0f, kInitialRowMax}, row_sum[i][h] = compensation[i][h] = 0.0f;
    }
    __device__ __forceinline__ float total(int i, int h) const {
        return kSumsOfLanes ? quad_sum(row_sum[i][h] + compensation[i][h]) : row_sum[i][h] + compensation[i][h];
    }
    // One addition a step, whose rounding error is kept, meets a sum of many tiles. `addend` is a lane's.
    __device__ __forceinline__ void add(int i, int h, float addend) {
        const float before = row_sum[i][h], added = kSumsOfLanes ? addend : quad_sum(addend);
        row_sum[i][h] = before + added;
        compensation[i][h] += added - (row_sum[i][h] - before);
    }

    // To move the rows to memory and back: calls move(x, n) for each number that a lane has of them and of O. n is the index of x among
    // kRowTiles * 16 * (4 + columns of O) numbers. Neighbouring lanes have neighbouring ones. The four lanes of a row share its statistics:
    // all of them load these, and one of them stores them.
    template <int kOutTiles, class Move>
    __device__ __forceinline__ void for_each(float (&O)[kRowTiles][kOutTiles][4], bool stores, const Move& move) {
        const int lane = lane_index();
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int n = (i * 2 + h) * 32 + lane / 4;
                if (stores && lane % 4 != 0) continue;
                move(origin[i][h].shift, n), move(origin[i][h].row_max, n + 8), move(row_sum[i][h], n + 16);
                move(compensation[i][h], n + 24);
            }
#pragma unroll
            for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) move(O[i][j][e], kRowTiles * 64 + ((i * kOutTiles + j) * 4 + e) * 32 + lane);
        }
    }
};

// Raises each row's maximum to that of S, and rescales its sum. `factor`, exp(old maximum - new maximum), is what rescales its row of O.
// Few warps have huge rows: the others need neither a shift nor a branch.
template <class Rows, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void update_row_max(Rows& rows, float (&factor)[kRowTiles][2], const float (&S)[kRowTiles][kKeyTiles][4],
                                               float scale_log2, float ln2_hi) {
    float maximum[kRowTiles][2];
    bool any_huge = false;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            maximum[i][h] = quad_max(lane_max(S[i], h));
            any_huge |= rows.origin[i][h].shift != 0.0f || is_huge(maximum[i][h], mul_rn(maximum[i][h], scale_log2));
        }
    rows.huge = vote_sync_any(any_huge);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Origin& origin = rows.origin[i][h];
            if (unlikely(rows.huge)) {
                factor[i][h] = move_origin(origin, maximum[i][h], scale_log2, ln2_hi);
            } else {
                const float before = origin.row_max;
                origin.row_max = fmaxf(before, mul_rn(maximum[i][h], scale_log2));
                factor[i][h] = ex2_approx_ftz(before - origin.row_max);
            }
            const float factor_of_sum = fmaf(factor[i][h], kEx2Bias, factor[i][h]);  // 1 stays 1
            rows.row_sum[i][h] *= factor_of_sum;
            rows.compensation[i][h] *= factor_of_sum;
        }
}

// P = exp2((S - shift) * scale_log2 - row_max) takes the registers of S.
template <class Rows, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void exponentiate(float (&S)[kRowTiles][kKeyTiles][4], const Rows& rows, float scale_log2) {
    if (unlikely(rows.huge)) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) S[i][j][e] -= rows.origin[i][e / 2].shift;
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) S[i][j][e] = ex2_approx_ftz(fmaf(S[i][j][e], scale_log2, -rows.origin[i][e / 2].row_max));
}

// Adds P to the row sums.
template <class Rows, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void add_row_sums(Rows& rows, const float (&P)[kRowTiles][kKeyTiles][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float partial[2] = {P[i][0][h * 2] + P[i][0][h * 2 + 1], P[i][1][h * 2] + P[i][1][h * 2 + 1]};
#pragma unroll
            for (int j = 2; j < kKeyTiles; ++j) partial[j % 2] += P[i][j][h * 2] + P[i][j][h * 2 + 1];
            rows.add(i, h, partial[0] + partial[1]);
        }
}

// O += P V. P is rounded to Element on the way: two neighbouring column tiles of the accumulator layout make one operand.
template <class Element, int kRowTiles, int kKeyTiles, int kOutTiles, int kColumns>
__device__ __forceinline__ void gemm_probabilities(float (&O)[kRowTiles][kOutTiles][4], const float (&P)[kRowTiles][kKeyTiles][4],
                                                   SharedAddress values, const LaneOffsets<kColumns>& offsets) {
#pragma unroll
    for (int slice = 0; slice < kKeyTiles / 2; ++slice) {
        u32 operand[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float* pair = P[i][slice * 2 + e / 2] + e % 2 * 2;
                operand[i][e] = cvt_rn_x2<Element>(pair[0], pair[1]);
            }
        gemm_output<Element>(O, operand, slice, values, offsets);
    }
}

// O = diag(factor) O, where row i*16 + h*8 + lane/4 has factor(i, h).
template <int kRowTiles, int kOutTiles, class Factor>
__device__ __forceinline__ void scale_rows(float (&O)[kRowTiles][kOutTiles][4], const Factor& factor) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        const float of_row[2] = {factor(i, 0), factor(i, 1)};
#pragma unroll
        for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) O[i][j][e] *= of_row[e / 2];
    }
}

// Makes each row's log-sum-exp its origin, so that exponents give normalised P. `factor` is what P lacks because of the origin's rounding.
template <class Rows, int kRowTiles>
__device__ __forceinline__ void move_origins_to_lse(Rows& rows, float (&factor)[kRowTiles][2]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float total = rows.total(i, h), before = rows.origin[i][h].row_max;
            const float height = total == 0.0f ? 0.0f : log_sum_exp(0.0f, total, {1.0f, 0.0f}) * 1.44269504f;
            rows.origin[i][h].row_max = before + height;
            factor[i][h] = ex2_approx_ftz((rows.origin[i][h].row_max - before) - height);
        }
}

// Where each warp has a slice of the keys: adds up all warps' rows in the first one. `memory`: what for_each moves of each warp.
template <int kWarps, class Rows, int kRowTiles, int kOutTiles>
__device__ __forceinline__ void add_up_warps(Rows& rows, float (&O)[kRowTiles][kOutTiles][4], SharedAddress memory, float scale_log2) {
    const SharedAddress bytes = kRowTiles * 16 * (4 + kOutTiles * 8) * 4, own_rows = memory + warp_index() * bytes;
    rows.for_each(O, true, [&](float& x, int n) { store_shared(own_rows + n * 4, __float_as_uint(x)); });
    barrier_sync();  // what all warps have is there
    for (int warp = 1; warp < (warp_index() == 0 ? kWarps : 1); ++warp) {
        Rows others;
        float others_O[kRowTiles][kOutTiles][4];
        others.for_each(others_O, false, [&](float& x, int n) { x = __uint_as_float(load_shared(memory + warp * bytes + n * 4)); });
#pragma unroll
        for (int row = 0; row < kRowTiles * 2; ++row) {
            const int i = row / 2, h = row % 2;
            const Origin own = rows.origin[i][h], other = others.origin[i][h];
            const float height = fmaf(other.shift - own.shift, scale_log2, other.row_max - own.row_max);
            const float factor = ex2_approx_ftz(fminf(-height, 0.0f)), others_factor = ex2_approx_ftz(fminf(height, 0.0f));
            if (height > 0.0f) rows.origin[i][h] = other;
            rows.row_sum[i][h] = rows.row_sum[i][h] * factor + others.total(i, h) * others_factor, rows.compensation[i][h] *= factor;
#pragma unroll
            for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                for (int e = h * 2; e < h * 2 + 2; ++e) O[i][j][e] = O[i][j][e] * factor + others_O[i][j][e] * others_factor;
        }
    }
}

// lse of one row: lane t of a quad computes that of row [t / 2][t % 2], if there is one. ln2_hi + ln2_lo is scale / scale_log2, about ln 2.
template <int kRowTiles, class Rows>
__device__ __forceinline__ float lse_of_lane(const Rows& rows, float scale_log2, float ln2_hi, float ln2_lo) {
    static_assert(kRowTiles <= 2, "each lane of a quad has one row");
    float shift = 0.0f, row_max = 0.0f, total = 0.0f;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // Read whether they are wanted or not: of a choice of addresses the compiler would make an array in local memory.
            const float shift_of_row = rows.origin[i][h].shift, max_of_row = rows.origin[i][h].row_max, total_of_row = rows.total(i, h);
            if (lane_index() % (kRowTiles * 2) == i * 2 + h) shift = shift_of_row, row_max = max_of_row, total = total_of_row;
        }
    return log_sum_exp({shift, row_max}, total, scale_log2, ln2_hi, ln2_lo);
}
