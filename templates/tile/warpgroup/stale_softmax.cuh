// Online softmax in base 2 with conditional rescaling: the row max moves where S exceeds it by more than kHeadroom. Config row_max: with
// `exact` every K block looks for that; with `stale` (kStaleRowMax) the first K block of a work tile and those with a mask do, and later
// ones keep the row max. The row sum, which is needed anyway, tells when that row max has become too low: only then a warp
// computes P of this block again, from the same S and a new row max, and rescales O and the row sum. After kRenewals of these, or one
// where links change scores within the exponential, every later block of the work tile updates the row max. Each warp decides by its own
// rows: a flag that warps share would be seen early or late, and results would differ from run to run.

// A lane whose partial row sum over a stale block reaches this limit has its warp compute P again. Below 2^15 no P would overflow fp16, and
// bf16 holds any. But the rounding of an exponent grows with its height above the row max, and where scores rise towards the keys that have
// most of a row's weight, it is most of lse's error.
//% if renews
__device__ __forceinline__ float sum_limit() { return 0x1p15f; }

// How far a stale row max is above the scores of its block. Scores that go on rising reach the limit later then, and exponents, which are
// rounded alike up to 16, may be as far below the row max as they may be above it. But P in fp16, which is normal from 2^-14 on, has no
// bits to lose: many keys far below the highest one may have much of a row's weight.
template <class Element>
__device__ __forceinline__ float row_lift();
template <>
__device__ __forceinline__ float row_lift<Bf16>() { return 15.0f; }
template <>
__device__ __forceinline__ float row_lift<Fp16>() { return 0.0f; }

constexpr int kRenewals = 4;

//% else
__device__ __forceinline__ float sum_limit() { return 0x1p12f; }

//% endif
// The statistics of a thread's two rows, lane/4 + h*8 of its warp's 16. The quad of lanes that holds a row has the same row max; each lane
// sums its own columns, and `finish` adds the four sums up.
template <class Element, bool kStaleRowMax>
struct OnlineSoftmax {
    float row_max[2];    // scale_log2 * the maximum of S when it was last updated, rounded; 0 in a huge row
    float shift[2];      // see Origin; valid if `huge`
    // compensation: what the additions to row_sum rounded away, exactly where row_sum >= the addend (Dekker 1971)
    float row_sum[2], compensation[2];
    float factor[2];     // rescales O, if needs_rescale
    bool needs_rescale;  // the last block updated a row max, or may have: the warp is huge; the same in the whole warp
//% if renews
    int renewals;  // how many are left; without one each later K block of this work tile updates the row max
//% else
    bool updates_every_block;  // each later K block of this work tile updates the row max
//% endif
    bool huge;  // some block's maximum was huge in a row of the warp: from then on each block is treated as if it had a huge row
//% if scatters
    bool rows_begun;  // each row of the warp has had a key, when the row max was last updated
//% endif
    float scale_log2, ln2_hi;

    __device__ __forceinline__ OnlineSoftmax(float scale_log2, float ln2_hi)
        : needs_rescale(false), scale_log2(scale_log2), ln2_hi(ln2_hi) {
        restart();
    }

    // A new work tile begins.
    __device__ __forceinline__ void restart() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row_max[h] = kInitialRowMax;
            shift[h] = 0.0f;
            row_sum[h] = compensation[h] = 0.0f;
        }
//% if renews
        renewals = kRenewals;
        huge = false;
//% elif folds and not scatters
        updates_every_block = true;
        huge = false;
//% else
        updates_every_block = huge = false;
//% endif
//% if scatters
        rows_begun = false;
//% endif
    }

//% if folds
//% if not scatters
    // The same: where all rows see whole K blocks (others may have few keys, and their lse is more exact with a row max) all scores are
    // guessed to be small, until sums of P tell that some are not. Small ones need no row max: it is 0.
    template <class Chain>
    __device__ __forceinline__ void restart(bool sees_whole_blocks, const Chain& chain) {
        restart();
        if (!kStaleRowMax || !sees_whole_blocks || small_sums(chain).most == 0.0f) return;
        row_max[0] = row_max[1] = 0.0f;
        updates_every_block = false;
    }
    // All lanes of a row's quad must agree whether it has had keys, though each sums its own columns.
    __device__ __forceinline__ void stop_guessing() {
#pragma unroll
        for (int h = 0; h < 2; ++h) row_max[h] = quad_sum(row_sum[h]) > 0.0f ? row_max[h] : kInitialRowMax;
        updates_every_block = true;
    }
//% endif
    // Whether a block updates the row max; where scores are guessed to be small, whether all of them are looked at first.
    __device__ __forceinline__ bool updates(bool new_rows) const { return !kStaleRowMax || new_rows || updates_every_block; }

//% endif
    // If the maximum of S exceeds the row max by more than kHeadroom in some row of the warp, every row whose maximum is higher than its
    // row max takes it. In a warp with a huge row this needs no headroom, and each row's shift is subtracted from S, too: so call it only
    // once for each S.
//% if folds
    // If `small`, the scores are not mapped yet: see small_log2.
    template <int kKeyTiles, class Chain>
    __device__ __forceinline__ void update_row_max(float (&S)[kKeyTiles][4], bool small, const Chain& chain) {
//% elif linear
    // The same of the row max that a lane's rows share, see LinearTerms. If the warp has a huge row, or rows that may not share, each row
    // has an origin of its own from here on, with a shift even if it is not huge, and `block` adds its terms to S. Returns as `find` does.
    template <int kKeyTiles, class Block>
    __device__ __forceinline__ float update_row_max(float (&S)[kKeyTiles][4], const Block& block) {
        block.terms.find(block.block, 0.0f);
        float highest[2] = {-infinity(), -infinity()};
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) highest[e / 2] = fmaxf(highest[e / 2], fmaf(S[j][e], scale_log2, block.terms.addend(j, e % 2)));
        highest[0] = quad_max(highest[0]), highest[1] = quad_max(highest[1]);
        const float half = block.terms.half_a_step(), higher = fmaxf(highest[0] + half, highest[1] - half);
        needs_rescale = vote_sync_any(higher - row_max[0] > kHeadroom);
        const float next = needs_rescale ? fmaxf(row_max[0], higher) : row_max[0], by = ex2_approx_ftz(row_max[0] - next);
        bool apart = !block.terms.may_share();
        float score = -infinity();  // the highest of the lane
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float total = quad_sum(row_sum[h]);
            const bool fits = total * by >= ex2_approx_ftz(-most_apart<Element>()) || highest[h] - next >= -most_apart<Element>();
            const bool has_no_key = total == 0.0f && highest[h] == -infinity();
            apart |= !(fits || has_no_key) || is_huge(highest[h], highest[h]);
            score = fmaxf(score, lane_max(S, h));
        }
        const bool steep = block.terms.half_a_step() > kSteep, shared = !huge;
        const bool near_zero = vote_sync_any(steep && score > -infinity()) && !vote_sync_any(steep && score * scale_log2 >= kNearZero);
        huge |= vote_sync_any(apart) || near_zero;
        if (unlikely(huge)) {
            if (shared) part_rows(block.terms);
            block.add_whole(S);
            const float maximum[2] = {quad_max(lane_max(S, 0)), quad_max(lane_max(S, 1))};
            update_huge_row_max(S, maximum);
            return 0.0f;
        }
        if (needs_rescale) rescale_sum(0, by), rescale_sum(1, by), row_max[0] = next;
        return block.terms.find(block.block, row_max[0]);
    }
    template <class Terms>
    __device__ __forceinline__ void part_rows(const Terms& terms) {
        row_max[1] = terms.row_max_of_second(row_max[0], row_sum[1]);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (quad_sum(row_sum[h]) == 0.0f) row_max[h] = kInitialRowMax;
    }
    // As move_origin, but a row that has had keys gets a shift, wherever its origin is.
    __device__ __forceinline__ float move_shift(Origin& origin, float maximum) const {
        const bool had_no_key = origin.row_max == kInitialRowMax;
        const float height = had_no_key ? maximum + infinity() : fmaf(maximum - origin.shift, scale_log2, -origin.row_max);
        if (!(height > 0.0f) && (had_no_key || origin.row_max == 0.0f)) return 1.0f;
        const Origin before = origin;
        const float shift = height > 0.0f ? maximum : origin.row_max * rcp_approx_ftz(scale_log2);  // about where it was
        origin = {fmaf(0.0f, mul_rn(shift, ln2_hi) * scale_log2, shift), 0.0f};
        return had_no_key ? 0.0f : ex2_approx_ftz(fmaf(before.shift - origin.shift, scale_log2, before.row_max));
    }
//% elif offsets
    // Where the warp has a huge row, the offsets are added to S, and become 0.
    template <int kKeyTiles>
    __device__ __forceinline__ void update_row_max(float (&S)[kKeyTiles][4], float lift, RowOffset (&offset)[2]) {
//% elif renews
    template <int kKeyTiles>
    __device__ __forceinline__ void update_row_max(float (&S)[kKeyTiles][4], float lift) {
//% else
    template <int kKeyTiles>
    __device__ __forceinline__ void update_row_max(float (&S)[kKeyTiles][4]) {
//% endif
//% if not linear
        float maximum[2], maximum_log2[2];
        bool above = false, any_huge = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
//% if offsets
            const float own = lane_max(S, h);
            maximum[h] = quad_max(own + offset[h].value());
            maximum_log2[h] = quad_max(fmaf(own, scale_log2, offset[h].log2_less(0.0f, scale_log2)));
//% else
            maximum[h] = quad_max(lane_max(S, h));
//% endif
//% if folds
            maximum_log2[h] = small ? small_log2(maximum[h], 0.0f, chain) : mul_rn(maximum[h], scale_log2);
//% elif not offsets
            maximum_log2[h] = mul_rn(maximum[h], scale_log2);
//% endif
            above |= maximum_log2[h] - row_max[h] > kHeadroom;
            any_huge |= is_huge(maximum[h], maximum_log2[h]);
        }
        huge |= vote_sync_any(any_huge);
        needs_rescale = vote_sync_any(above);
        if (unlikely(huge)) {
//% if offsets
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) S[j][e] += offset[e / 2].value();
            offset[0].distance = offset[1].distance = 0.0f;
//% endif
            update_huge_row_max(S, maximum);
        } else if (needs_rescale) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
//% if renews
                const float next = fmaxf(row_max[h], maximum_log2[h] + lift);
//% else
                const float next = fmaxf(row_max[h], maximum_log2[h]);
//% endif
                rescale_sum(h, ex2_approx_ftz(row_max[h] - next));
                row_max[h] = next;
            }
        }
//% if scatters
        rows_begun = !vote_sync_any(row_max[0] == kInitialRowMax || row_max[1] == kInitialRowMax);
//% endif
    }
//% endif
    template <int kKeyTiles>
    __device__ __forceinline__ void update_huge_row_max(float (&S)[kKeyTiles][4], const float (&maximum)[2]) {
        // Every later block must come here, too, since S loses the shift here. A row that does not move has a factor of 1.
//% if renews
        needs_rescale = true;
        renewals = 0;
//% else
        needs_rescale = updates_every_block = true;
//% endif
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Origin origin{shift[h], row_max[h]};
//% if linear
            rescale_sum(h, move_shift(origin, maximum[h]));
//% else
            rescale_sum(h, move_origin(origin, maximum[h], scale_log2, ln2_hi));
//% endif
            shift[h] = origin.shift;
            row_max[h] = origin.row_max;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                S[j][h * 2] -= shift[h];
                S[j][h * 2 + 1] -= shift[h];
            }
        }
    }
    // Rescales the row sum, and keeps the factor by which `rescale` rescales O once its product is complete.
    __device__ __forceinline__ void rescale_sum(int h, float by) {
        factor[h] = by;
        const float factor_of_sum = fmaf(by, kEx2Bias, by);  // 1 stays 1
        row_sum[h] *= factor_of_sum;
        compensation[h] *= factor_of_sum;
    }

    // P = exp2(S * scale_log2 - row_max) of a K block, rounded to Element, as the operand of P V: two neighbouring column tiles of the
//% if folds
//% if scatters
    // accumulator layout make one operand. Adds P to the row sums.
    // `updates`: whether the block updates the row max; `small`: whether all of its scores are, else they are mapped. If the row max has
    // become too low, `updates` becomes true, row sums and row max stay, and the result is false.
    template <int kKeyTiles, class Chain>
    __device__ __forceinline__ bool exp2_and_sum(u32 (&P)[kKeyTiles / 2][4], float (&S)[kKeyTiles][4], bool& updates, bool small,
                                                 const Chain& chain) {
        needs_rescale = false;
        if (updates) update_row_max(S, small, chain);
        float partial[2][2];
        if (small) exponentiate<true>(P, partial, S, chain);
        else exponentiate<false>(P, partial, S, chain);
#pragma unroll
        for (int h = 0; h < 2; ++h) partial[h][0] += partial[h][1];
        const bool fits = partial[0][0] < sum_limit() && partial[1][0] < sum_limit();
        if (kStaleRowMax && !updates && vote_sync_any(!fits)) {
            updates = updates_every_block = true;
            return false;
        }
//% else
    // accumulator layout make one operand. Sums of P go to `partial`, and from there by add_to_sums to the row sums.
    // Of scores that are small, or are guessed to be, which are multiplied by `by` first. Returns false if they are not: then nothing is
    // guessed from here on, and `by` becomes 1.
    template <int kKeyTiles, class Chain>
    __device__ __forceinline__ bool exponentiate_small(u32 (&P)[kKeyTiles / 2][4], float (&partial)[2][2], float (&S)[kKeyTiles][4],
                                                       float& by, bool guessed, const Chain& chain) {
        // Nothing would hide how long a vote takes behind the last exponential. So it is held before those of the last column tiles, whose
        // scores are looked at themselves.
        constexpr int kSummed = kKeyTiles - 2;
        multiply_scores(S, by);
        float highest = 0.0f;
#pragma unroll
        for (int j = kSummed; j < kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) highest = fmaxf(highest, fabsf(S[j][e]));
        partial[0][0] = partial[0][1] = partial[1][0] = partial[1][1] = 0.0f;
        exponentiate_tiles<true, 0, kSummed>(P, partial, S, chain);
        const bool small = small_up_to(highest, chain) &&
                           small_sums(chain).have(partial[0][0] + partial[0][1], partial[1][0] + partial[1][1]);
        const bool wrong = kStaleRowMax && vote_sync_any(guessed && !small);
        exponentiate_tiles<true, kSummed, kKeyTiles>(P, partial, S, chain);
        if (!wrong) return true;
        by = 1.0f;
        stop_guessing();
        return false;
    }
    // Of a block that was looked at: if all rows were guessed to have small scores, and these are not, they have a row max from now on.
    template <int kKeyTiles, class Chain>
    __device__ __forceinline__ void update_row_max_if_any(float (&S)[kKeyTiles][4], bool small, const Chain& chain) {
        if (!small && !updates_every_block) stop_guessing();
        if (updates_every_block) update_row_max(S, small, chain);
    }
    __device__ __forceinline__ void add_to_sums(float (&partial)[2][2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) partial[h][0] += partial[h][1];
//% endif
//% else
    // accumulator layout make one operand. Adds P to the row sums. `new_rows`: for some rows this may be their first block.
//% if linear
    // `block`: its terms, which are prepared for the row max as it is.
    template <int kKeyTiles, class Block>
    __device__ __forceinline__ void exp2_and_sum(u32 (&P)[kKeyTiles / 2][4], float (&S)[kKeyTiles][4], bool new_rows, const Block& block) {
//% elif offsets
    template <int kKeyTiles>
    __device__ __forceinline__ void exp2_and_sum(u32 (&P)[kKeyTiles / 2][4], float (&S)[kKeyTiles][4], bool new_rows,
                                                 RowOffset (&offset)[2]) {
//% else
    template <int kKeyTiles>
    __device__ __forceinline__ void exp2_and_sum(u32 (&P)[kKeyTiles / 2][4], float (&S)[kKeyTiles][4], bool new_rows) {
//% endif
//% if renews
        bool updates_row_max = !kStaleRowMax || new_rows || renewals == 0;
        const float lift = kStaleRowMax && renewals > 0 ? row_lift<Element>() : 0.0f;
//% else
        bool updates_row_max = !kStaleRowMax || new_rows || updates_every_block;
//% endif
        needs_rescale = false;
        float partial[2][2];
//% if linear
        float correction = 0.0f;  // of these
//% endif
#pragma unroll 1
        for (;;) {  // a loop, so that the code of the exponentials is there once
//% if linear
            if (updates_row_max) correction = update_row_max(S, block);
//% elif offsets
            if (updates_row_max) update_row_max(S, lift, offset);
            const float minuend[2] = {offset[0].log2_less(row_max[0], scale_log2), offset[1].log2_less(row_max[1], scale_log2)};
//% elif renews
            if (updates_row_max) update_row_max(S, lift);
//% else
            if (updates_row_max) update_row_max(S);
//% endif
            partial[0][0] = partial[0][1] = partial[1][0] = partial[1][1] = 0.0f;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
//% if linear
                    const float low = ex2_approx_ftz(fmaf(S[j][h * 2], scale_log2, block.terms.addend(j, 0)));
                    const float high = ex2_approx_ftz(fmaf(S[j][h * 2 + 1], scale_log2, block.terms.addend(j, 1)));
//% elif offsets
                    const float low = ex2_approx_ftz(fmaf(S[j][h * 2], scale_log2, minuend[h]));
                    const float high = ex2_approx_ftz(fmaf(S[j][h * 2 + 1], scale_log2, minuend[h]));
//% else
                    const float low = ex2_approx_ftz(fmaf(S[j][h * 2], scale_log2, -row_max[h]));
                    const float high = ex2_approx_ftz(fmaf(S[j][h * 2 + 1], scale_log2, -row_max[h]));
//% endif
                    partial[h][0] += low;
                    partial[h][1] += high;
                    P[j / 2][j % 2 * 2 + h] = cvt_rn_x2<Element>(low, high);
                }
#pragma unroll
            for (int h = 0; h < 2; ++h) partial[h][0] += partial[h][1];
//% if linear
            if (updates_row_max) {
                partial[0][0] = fmaf(partial[0][0], correction, partial[0][0]);
                partial[1][0] = fmaf(partial[1][0], correction, partial[1][0]);
                break;
            }
//% else
            if (!kStaleRowMax || updates_row_max) break;
//% endif
            const bool fits = partial[0][0] < sum_limit() && partial[1][0] < sum_limit();
            if (!vote_sync_any(!fits)) break;
//% if renews
            updates_row_max = true;
            --renewals;
//% else
            updates_row_max = updates_every_block = true;
//% endif
        }
//% endif
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float before = row_sum[h];
            row_sum[h] = before + partial[h][0];
            compensation[h] += partial[h][0] - (row_sum[h] - before);
        }
//% if folds and scatters
        return true;
//% endif
    }

//% if folds
    // P of small scores, or of those that are mapped.
    template <bool kSmall, int kKeyTiles, class Chain>
    __device__ __forceinline__ void exponentiate(u32 (&P)[kKeyTiles / 2][4], float (&partial)[2][2], const float (&S)[kKeyTiles][4],
                                                 const Chain& chain) const {
        partial[0][0] = partial[0][1] = partial[1][0] = partial[1][1] = 0.0f;
        exponentiate_tiles<kSmall, 0, kKeyTiles>(P, partial, S, chain);
    }
    // The same of column tiles kFrom to kTo - 1, whose sums are added to `partial`.
    template <bool kSmall, int kFrom, int kTo, int kKeyTiles, class Chain>
    __device__ __forceinline__ void exponentiate_tiles(u32 (&P)[kKeyTiles / 2][4], float (&partial)[2][2], const float (&S)[kKeyTiles][4],
                                                       const Chain& chain) const {
#pragma unroll
        for (int j = kFrom; j < kTo; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float p[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float s = S[j][h * 2 + e];
                    if (kSmall) p[e] = ex2_approx_ftz(small_log2(s, row_max[h], chain));
                    else p[e] = ex2_approx_ftz(fmaf(s, scale_log2, -row_max[h]));
                    partial[h][e] += p[e];
                }
                P[j / 2][j % 2 * 2 + h] = cvt_rn_x2<Element>(p[0], p[1]);
            }
    }

//% endif
    template <int kOutTiles>
    __device__ __forceinline__ void rescale(float (&O)[kOutTiles][4]) const {
#pragma unroll
        for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) O[j][e] *= factor[e / 2];
    }

    // The factors that normalise O, and the row statistics from which the LSE writer computes lse.
//% if joins
    // `sinks`: of the two rows.
    __device__ __forceinline__ PairStatistics finish(float (&normalisers)[2], const float (&sinks)[2], float unit, float ln2_lo) const {
//% else
//% if linear
    template <class Terms>
    __device__ __forceinline__ PairStatistics finish(float (&normalisers)[2], const Terms& terms) const {
//% else
    __device__ __forceinline__ PairStatistics finish(float (&normalisers)[2]) const {
//% endif
//% endif
        PairStatistics statistics;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            statistics.rows[h] = {quad_sum(row_sum[h] + compensation[h]), row_max[h]};
//% if joins
            const Origin origin{unlikely(huge) ? shift[h] : 0.0f, statistics.rows[h].row_max};
            normalisers[h] = normaliser_with_sink(statistics.rows[h].total, height_of_sink(sinks[h], origin, unit, ln2_hi, ln2_lo));
//% else
            normalisers[h] = normaliser(statistics.rows[h].total);
//% endif
//% if linear
            if (!huge && h) statistics.rows[h].row_max = terms.row_max_of_second(row_max[0], statistics.rows[h].total);
//% endif
            if (unlikely(huge) && shift[h] != 0.0f) statistics.rows[h] = {-statistics.rows[h].total, shift[h]};
        }
        return statistics;
    }
};
