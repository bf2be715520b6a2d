// Rows of which the forward pass has not saved enough, so that the first kernel goes through their keys once more:
// - Huge rows, whose log-sum-exp is so large that fp32 has lost what P = exp2(S * scale_log2 - row_lse) needs: see `Origin` in
//   softmax_rows.cuh. Their P is exp2((S - row_shift) * scale_log2 - row_lse), with the row's maximum as the shift.
// - All rows of sequences with few keys. Where one key has nearly all of a row's probability, dP - delta should nearly vanish; but
//   rowsum(dO * O), in row_delta, comes from the rounded O, so that dS keeps the rounding error of O. Plain PyTorch sums up P * dP, where
//   errors vanish with dS. Among many keys the gradients of other rows are so much larger that this does not show. A query that sees one
//   key has exactly no gradient.
// This is made to be short, not fast.

constexpr int kFewKeys = 64;

// By its lse, since the forward pass has not saved the maximum, from which lse differs by log(len_kv) at most. NaN and +inf count as huge.
__device__ __forceinline__ bool is_huge_lse(float lse) { return !(fabsf(lse) * 1.44269504f < kHuge) && lse != -infinity(); }

// Whether any of kRows rows is huge, of which `rows_valid` exist. All lanes of a warp ask together.
template <int kRows>
__device__ __forceinline__ bool any_huge_row(const float* lse, int rows_valid) {
    bool huge = false;
#pragma unroll
    for (int row = lane_index(); row < kRows; row += 32) huge |= row < rows_valid && is_huge_lse(lse[row]);
    return vote_sync_any(huge);
}

// A row's maximum over some of its keys, and with E = exp2((S - maximum) * scale_log2) the sums of E and of E * dP.
struct RowSum {
    float maximum, row_sum, d_p;

    __device__ __forceinline__ void add(const RowSum& other, float scale_log2) {
        const float higher = fmaxf(maximum, other.maximum);
        auto factor = [&](float x) {  // -inf - (-inf) would be NaN
            return x == higher ? 1.0f : ex2_approx_ftz((x - higher) * scale_log2);
        };
        const float own = factor(maximum), others = factor(other.maximum);
        *this = {higher, row_sum * own + other.row_sum * others, d_p * own + other.d_p * others};
    }
};

// The first of some rows of a tensor, and how many there are.
template <class Element>
struct Rows {
    const Element* first;
    i64 stride;
    int count;

    // Past the end, the last one: nobody uses what comes of it.
    __device__ __forceinline__ const Element* row(int i) const { return first + min(i, count - 1) * stride; }
};
template <class Element>
Rows(const Element*, i64, int) -> Rows<Element>;

// 32 columns of a row as two matrix products take them, zeros past its end: words[i] is of columns i * 8 + lane % 4 * 2 and the next one.
// A lane loads what is contiguous, and four lanes exchange it.
template <int kWidth, class Element>
__device__ __forceinline__ void load_operand(u32 (&words)[4], const Element* row, int first_column) {
    const int column = first_column + lane_index() % 4 * 8;
    const uint4 v = column < kWidth ? *reinterpret_cast<const uint4*>(row + column) : uint4{0, 0, 0, 0};
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool upper = lane_index() & distance;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & distance) continue;
            u32 &low = words[i], &high = words[i + distance];
            const u32 other = shfl_sync_bfly(upper ? low : high, distance);
            (upper ? low : high) = other;
        }
    }
}

// The product of 16 keys' rows and 8 queries' rows. It takes columns in the order of the main kernel's products, so that both
// round it alike as far as mma.sync and wgmma do.
template <int kWidth, class Element>
__device__ __forceinline__ void multiply_rows(float (&product)[4], const Rows<Element>& keys, int first_key, const Rows<Element>& queries,
                                              int first_query) {
    const int own_row = lane_index() / 4;
    const Element *low_key = keys.row(first_key + own_row), *high_key = keys.row(first_key + own_row + 8);
    const Element* query = queries.row(first_query + own_row);
#pragma unroll
    for (int e = 0; e < 4; ++e) product[e] = 0.0f;
    int column = 0;
    launder(column);  // narrow rows have a loop, too: without one the assembler mixes two products, and has not registers enough
#pragma unroll 1
    for (; column < kWidth; column += 32) {
        u32 low[4], high[4], b[4];
        load_operand<kWidth>(low, low_key, column);
        load_operand<kWidth>(high, high_key, column);
        load_operand<kWidth>(b, query, column);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const u32 a[4] = {low[i], high[i], low[i + 1], high[i + 1]};
            mma_sync_m16n8k16<Element>(product, a, b[i], b[i + 1]);
        }
    }
}

// What a walk over keys reads: of the queries of a tile, and of all keys that they may see.
template <class Element>
struct WalkedRows {
    Rows<Element> q, d_out, k, v;
};
template <class Element>
WalkedRows(Rows<Element>, Rows<Element>, Rows<Element>, Rows<Element>) -> WalkedRows<Element>;

// The sums of 8 rows of a tile from `first` on, of which this lane has first + lane % 4 * 2 and the next one.
template <int kHeadDim, int kHeadDimV, class Chain, class Element>
__device__ __forceinline__ void sum_rows(RowSum (&sums)[2], const WalkedRows<Element>& rows, int first, int first_query, float scale_log2,
//% if drops
                                         const Chain& chain, const Dropout& dropout) {
//% else
                                         const Chain& chain) {
//% endif
    const int query = first_query + first + lane_index() % 4 * 2;
    sums[0] = sums[1] = {-infinity(), 0.0f, 0.0f};
#pragma unroll 1
    for (int first_key = 0; first_key < rows.k.count; first_key += 16) {
        float s[4], d_p[4];
        multiply_rows<kHeadDim>(s, rows.k, first_key, rows.q, first);
        multiply_rows<kHeadDimV>(d_p, rows.v, first_key, rows.d_out, first);
//% if drops
#pragma unroll
        for (int e = 0; e < 4; ++e) d_p[e] *= keep_factor(dropout, query + e % 2, first_key + lane_index() / 4 + e / 2 * 8);
//% endif
//% if changes
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] = changed_score(s[e], query + e % 2, first_key + lane_index() / 4 + e / 2 * 8, chain);
//% endif
#pragma unroll
        for (int e = 0; e < 4; ++e)
//% if adds
            if (s[e] != -infinity() && chain.visible(query + e % 2, first_key + lane_index() / 4 + e / 2 * 8))
                sums[e % 2].add({s[e], 1.0f, d_p[e]}, scale_log2);
//% else
            if (chain.visible(query + e % 2, first_key + lane_index() / 4 + e / 2 * 8)) sums[e % 2].add({s[e], 1.0f, d_p[e]}, scale_log2);
//% endif
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const RowSum& own = sums[e];
            const float maximum = shfl_sync_bfly(own.maximum, distance), row_sum = shfl_sync_bfly(own.row_sum, distance);
            const RowSum other{maximum, row_sum, shfl_sync_bfly(own.d_p, distance)};
            sums[e].add(other, scale_log2);
        }
}

// Writes row_lse of a tile's huge rows, row_shift, which is 0 for the others, and row_delta of all rows. The pointers are to the first row
// of the tile, which is `first_query` of a head. `huge`: whether it has huge rows.
template <int kThreads, int kRows, int kHeadDim, int kHeadDimV, class Sequences, class Chain, class Parameters>
__device__ __forceinline__ void write_exact_rows(float* row_lse, float* row_delta, float* row_shift, const Parameters& p,
                                                 const Sequences& sequences, int batch, int head, int first_query, bool huge,
                                                 const Chain& chain) {
    const Strides of_q{p.q_batch, p.q_head, p.q_row}, of_d_out{p.d_out_batch, p.d_out_head, p.d_out_row};
    const Strides of_k{p.k_batch, p.k_head, p.k_row}, of_v{p.v_batch, p.v_head, p.v_row};
    const int head_kv = divide(head, p.group_reciprocal), queries = sequences.len_q(batch) - first_query, keys = sequences.len_kv(batch);
    const WalkedRows rows{Rows{sequences.query_row(p.q, of_q, batch, head, first_query), p.q_row, queries},
                          Rows{sequences.query_row(p.d_out, of_d_out, batch, head, first_query), p.d_out_row, queries},
                          Rows{sequences.key_row(p.k, of_k, batch, head_kv, 0), p.k_row, keys},
                          Rows{sequences.key_row(p.v, of_v, batch, head_kv, 0), p.v_row, keys}};
#pragma unroll 1
    for (int first = warp_index() * 8; first < (huge ? kRows : min(kRows, queries)); first += kThreads / 4) {
        RowSum sums[2];
//% if heads and opens
        const Chain own_chain = of_head(of_batch(chain, batch), batch, head);
//% elif heads
        const Chain own_chain = of_head(chain, batch, head);
//% elif opens
        const Chain own_chain = of_batch(chain, batch);
//% endif
//% if drops and (heads or opens)
        sum_rows<kHeadDim, kHeadDimV>(sums, rows, first, first_query, p.scale_log2, own_chain, Dropout::of(p, batch, head));
//% elif drops
        sum_rows<kHeadDim, kHeadDimV>(sums, rows, first, first_query, p.scale_log2, chain, Dropout::of(p, batch, head));
//% elif heads or opens
        sum_rows<kHeadDim, kHeadDimV>(sums, rows, first, first_query, p.scale_log2, own_chain);
//% else
        sum_rows<kHeadDim, kHeadDimV>(sums, rows, first, first_query, p.scale_log2, chain);
//% endif
        if (lane_index() >= 8) continue;  // each of these has one row
        const RowSum own = lane_index() < 4 ? sums[0] : sums[1];
        const int row = first + lane_index() % 4 * 2 + lane_index() / 4;
        const i64 index = sequences.lse_offset(batch, head) + first_query + row;
//% if joins
        // A row that sees no key, but has a huge sink, needs no shift.
        const bool exists = row < queries, huge_row = exists && is_huge_lse(p.lse[index]) && own.maximum != -infinity();
        // The sink above the maximum, in the sink's units. One of -inf is none, also for a row that sees no key: -inf + inf would be NaN.
        const float sink = p.sinks[head], above = sink == -infinity() ? sink : fmaf(-own.maximum, p.sinks_unit, sink);
        row_shift[row] = huge_row ? own.maximum : 0.0f;
        if (huge_row) row_lse[row] = lse_with_sink(log_sum_exp(0.0f, own.row_sum, {1.0f, 0.0f}), above) * 1.44269504f;
        const float inverse = normaliser_with_sink(own.row_sum, above > 1.0e3f ? 1.0e3f : above * 1.44269504f);
        if (exists) row_delta[row] = own.d_p * inverse - (p.d_lse == nullptr ? 0.0f : p.d_lse[index]);
//% else
        const bool exists = row < queries, huge_row = exists && is_huge_lse(p.lse[index]);
        row_shift[row] = huge_row ? own.maximum : 0.0f;
        if (huge_row) row_lse[row] = log_sum_exp(0.0f, own.row_sum, {1.0f, 0.0f}) * 1.44269504f;
        if (exists) row_delta[row] = own.d_p * normaliser(own.row_sum) - (p.d_lse == nullptr ? 0.0f : p.d_lse[index]);
//% endif
    }
}
