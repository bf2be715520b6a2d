// ALiBi as a link of the chain: a score loses slope * |query + len_kv - len_q - key|, with a slope of its head.

struct Alibi : HidesNothing<Alibi> {
    static constexpr bool kAddsToScores = true, kLeavesOffsets = true, kHasHeads = true;
    const float* slopes;  // [batch, heads_q], batch_step from one entry of the batch to the next
    int batch_step, causal_offset;
    float per_unit, per_unit_low;  // from a slope to that of scores as the product gives them, in two floats
    // Of the heads of a lane's rows lane/4 and lane/4 + 8, in units of those scores. The second float is for long distances, and for the
    // rows that do not see the keys beside the diagonal, whose terms are small.
    float slope[2], slope_low[2];

    template <class Parameters>
    __device__ __forceinline__ static Alibi of(const Parameters& p, int len_q, int len_kv) {
        return {{}, p.alibi_slopes, p.alibi_batch_step, len_kv - len_q, p.alibi_per_unit, p.alibi_per_unit_low, {}, {}};
    }
    __device__ __forceinline__ void load_heads(int batch, int first, int second) {
        const float* of_batch = slopes + static_cast<i64>(batch) * batch_step;
        const float each[2] = {of_batch[first], of_batch[second]};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            slope[h] = mul_rn(each[h], per_unit);
            slope_low[h] = fmaf(each[h], per_unit, -slope[h]) + each[h] * per_unit_low;
        }
    }
    __device__ __forceinline__ float changed(float s, int query, int key) const {
        return s + RowOffset{-slope[0], -slope_low[0], fabsf(static_cast<float>(query + causal_offset - key))}.value();
    }

    // From the first of a warp's columns to a row, along the diagonal: the term of column n is -slope * |distance - n|.
    template <class Position>
    __device__ __forceinline__ int distance(const Position& position, int row) const {
        return row + (Position::kRowsAreKeys ? -causal_offset : causal_offset) - position.first_column;
    }

    // Adds what differs along a row. Beside the diagonal terms are linear in n: one multiply-add, from the column that is nearest to the
    // diagonal, whose term is left to `offset`: so what is added errs by a rounding of the term itself, and not of a larger one.
    template <class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ void add(float (&S)[kRowTiles][kTiles][4], RowOffset (&offset)[kRowTiles][2],
                                        const Position& position) const {
        if (distance(position, position.first_row_of_warp()) >= kTiles * 8 - 1) add_beside<true>(S, offset, position);
        else if (distance(position, position.template last_row_of_warp<kRowTiles>()) <= 0) add_beside<false>(S, offset, position);
        else add_whole(S, position);
    }
    template <class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ void add_whole(float (&S)[kRowTiles][kTiles][4], const Position& position) const {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) add_to_row<Position::kTwoHeads>(S[i], h, distance(position, position.row(i, h)));
    }
    // Adds all to a lane's row h, rounded once. `distance`: along the diagonal, from the warp's first column to the row.
    template <bool kTwoHeads, int kTiles>
    __device__ __forceinline__ void add_to_row(float (&S)[kTiles][4], int h, int distance) const {
        const float from = static_cast<float>(distance - lane_index() % 4 * 2);
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float length = fabsf(from - static_cast<float>(j * 8 + e));
                float& s = S[j][h * 2 + e];
                s = fmaf(-slope[kTwoHeads * h], length, fmaf(-slope_low[kTwoHeads * h], length, s));
            }
    }

  private:
    // All columns come before the diagonal, or all after it.
    template <bool kBefore, class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ void add_beside(float (&S)[kRowTiles][kTiles][4], RowOffset (&offset)[kRowTiles][2],
                                               const Position& position) const {
        constexpr int kNearest = kBefore ? kTiles * 8 - 7 : 0;  // the nearest of a lane's columns, from its first one
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float own = slope[Position::kTwoHeads * h], step = kBefore ? own : -own;
                const int nearest = distance(position, position.row(i, h)) - lane_index() % 4 * 2 - kNearest;
                offset[i][h] = {-own, -slope_low[Position::kTwoHeads * h], fabsf(static_cast<float>(nearest))};
#pragma unroll
                for (int j = 0; j < kTiles; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        S[i][j][h * 2 + e] = fmaf(step, static_cast<float>(j * 8 + e - kNearest), S[i][j][h * 2 + e]);
            }
    }
};
