// From S^T and dP^T of a warp to P^T and dS^T. Their rows are keys, their columns queries: a lane holds two neighbouring queries of each
// column tile of 8, whose statistics it reads from shared memory.

//% if scatters
// S = -inf where ranges of the chain hide a key from a query. `first_key` and `first_query` are the positions of s[0][0] of this warp.
//% else
// S = -inf where the chain says that a query does not see a key. `first_key` and `first_query` are the positions of s[0][0] of this warp.
//% endif
template <class Chain, int kRowTiles, int kTiles>
__device__ __forceinline__ void mask_transposed(float (&s)[kRowTiles][kTiles][4], int first_key, int first_query, const Chain& chain) {
    const int key = first_key + lane_index() / 4, query = first_query + lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
//% if scatters
                if (!chain.in_ranges(query + j * 8 + e % 2, key + i * 16 + e / 2 * 8)) s[i][j][e] = -infinity();
//% else
                if (!chain.visible(query + j * 8 + e % 2, key + i * 16 + e / 2 * 8)) s[i][j][e] = -infinity();
//% endif
}

//% if by_key
// The same, by one range of queries for each row. Where several links hide keys the kernels for Hopper have no registers to ask for each
// score.
template <class Chain, int kRowTiles, int kTiles>
__device__ __forceinline__ void mask_by_key(float (&s)[kRowTiles][kTiles][4], int first_key, int first_query, const Chain& chain) {
    const int key = first_key + lane_index() / 4, query = first_query + lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int own = key + i * 16 + h * 8;
//% if opens
            const QueryRange seeing = chain.queries_of(own);
//% else
            const QueryRange seeing = chain.queries(own, own + 1);
//% endif
            const int from = query - seeing.begin, count = max(0, seeing.end - seeing.begin);
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (static_cast<u32>(from + j * 8 + e) >= static_cast<u32>(count)) s[i][j][h * 2 + e] = -infinity();
        }
}

//% endif
// S - row_shift: of tiles that have huge rows. `row_shift` is in global memory, of the first column's query.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void shift_transposed(float (&s)[kRowTiles][kTiles][4], const float* row_shift) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float shift = row_shift[j * 8 + lane_index() % 4 * 2 + e];
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) s[i][j][e] -= shift, s[i][j][e + 2] -= shift;
        }
}

// P = exp2(S * scale_log2 - row_lse), in the place of S. `row_lse` is in shared memory, of the first column's query.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void exponentiate(float (&s)[kRowTiles][kTiles][4], float scale_log2, SharedAddress row_lse) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        float lse[2];
        load_shared_pair(lse[0], lse[1], row_lse + (j * 8 + lane_index() % 4 * 2) * 4);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[i][j][e] = ex2_approx_ftz(fmaf(s[i][j][e], scale_log2, -lse[e % 2]));
    }
}

//% if adds
// The same of scores to which offsets are still to be added.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void exponentiate(float (&s)[kRowTiles][kTiles][4], float scale_log2, SharedAddress row_lse,
                                             const RowOffset (&offset)[kRowTiles][2]) {
    float offset_log2[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) offset_log2[i][h] = offset[i][h].log2_less(0.0f, scale_log2);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        float lse[2];
        load_shared_pair(lse[0], lse[1], row_lse + (j * 8 + lane_index() % 4 * 2) * 4);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[i][j][e] = ex2_approx_ftz(fmaf(s[i][j][e], scale_log2, offset_log2[i][e / 2] - lse[e % 2]));
    }
}

//% endif
// dS = P * (dP - row_delta), in the place of dP. Not scaled: the sums over dS are, once.
//% if drops
// scale: of dP.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void differentiate(float (&dp)[kRowTiles][kTiles][4], const float (&P)[kRowTiles][kTiles][4],
                                              SharedAddress row_delta, float scale) {
//% else
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void differentiate(float (&dp)[kRowTiles][kTiles][4], const float (&P)[kRowTiles][kTiles][4],
                                              SharedAddress row_delta) {
//% endif
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        float delta[2];
        load_shared_pair(delta[0], delta[1], row_delta + (j * 8 + lane_index() % 4 * 2) * 4);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
//% if drops
            for (int e = 0; e < 4; ++e) dp[i][j][e] = P[i][j][e] * fmaf(dp[i][j][e], scale, -delta[e % 2]);
//% else
            for (int e = 0; e < 4; ++e) dp[i][j][e] = P[i][j][e] * (dp[i][j][e] - delta[e % 2]);
//% endif
    }
}

//% if maps
// The same in two steps, where a link maps scores: (dP - row_delta) * derivative, by the mapped scores, ..
template <int kRowTiles, int kTiles, class Chain>
__device__ __forceinline__ void differentiate_map(float (&dp)[kRowTiles][kTiles][4], const float (&s)[kRowTiles][kTiles][4],
                                                     SharedAddress row_delta, const Chain& chain) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        float delta[2];
        load_shared_pair(delta[0], delta[1], row_delta + (j * 8 + lane_index() % 4 * 2) * 4);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) dp[i][j][e] = (dp[i][j][e] - delta[e % 2]) * score_derivative(s[i][j][e], chain);
    }
}
// .. and times P, which has taken the place of the scores; where dS of mapped scores is collected first, this times the derivatives.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void multiply(float (&dp)[kRowTiles][kTiles][4], const float (&P)[kRowTiles][kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) dp[i][j][e] *= P[i][j][e];
}
// The derivatives of mapped scores alone, for those that need dS without them first.
template <int kRowTiles, int kTiles, class Chain>
__device__ __forceinline__ void differentiate_scores(float (&slopes)[kRowTiles][kTiles][4], const float (&s)[kRowTiles][kTiles][4],
                                                     const Chain& chain) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) slopes[i][j][e] = score_derivative(s[i][j][e], chain);
}

// P, rounded as an operand, and P * derivative in the place of mapped scores: for a dP that comes later. kHuge: the tile has huge rows, and
// row_shift is in global memory, of the first column's query.
template <class Element, bool kHuge, int kTiles, class Chain>
__device__ __forceinline__ void exponentiate_and_weigh(u32 (&P)[kTiles / 2][4], float (&s)[1][kTiles][4], float scale_log2,
                                                       SharedAddress row_lse, const float* row_shift, const ScorePosition<true>& position,
                                                       const Chain& chain) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        const int column = j * 8 + lane_index() % 4 * 2;
        float lse[2];
        load_shared_pair(lse[0], lse[1], row_lse + column * 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float p[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = s[0][j][h * 2 + e];
                const float whole = added_score(score, position.first_column + column + e, position.row(0, h), chain);
                p[e] = ex2_approx_ftz(fmaf(kHuge ? whole - row_shift[column + e] : whole, scale_log2, -lse[e]));
                score = p[e] * score_derivative(score, chain);
            }
            P[j / 2][j % 2 * 2 + h] = cvt_rn_x2<Element>(p[0], p[1]);
        }
    }
}

//% endif
// Rounds two neighbouring column tiles: they are then the left operand of a product over their 16 queries.
template <class Element, int kRowTiles, int kTiles>
__device__ __forceinline__ void round_to_operand(u32 (&a)[kRowTiles][4], const float (&x)[kRowTiles][kTiles][4], int slice) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float(&tile)[4] = x[i][slice * 2 + r / 2];
            a[i][r] = cvt_rn_x2<Element>(tile[r % 2 * 2], tile[r % 2 * 2 + 1]);
        }
}

// Writes such an operand to a tile [key][query], 16 queries from `first_query` on.
template <int kRowTiles, class Tile>
__device__ __forceinline__ void store_operand(const Tile& tile, int first_key, int first_query, const u32 (&a)[kRowTiles][4]) {
    int lane = lane_index();
    launder(lane);  // or the compiler would keep the addresses of all queries of a tile in registers
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r)
            store_shared(tile.at(first_key + i * 16 + r % 2 * 8 + lane / 4, first_query / 8 + r / 2) + lane % 4 * 4, a[i][r]);
}
