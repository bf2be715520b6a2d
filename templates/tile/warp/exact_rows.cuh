// Rows of which the forward pass has not saved enough, so that the first kernel goes through their keys once more:
// - Huge rows, whose log-sum-exp is so large that fp32 has lost what P = exp2(S * scale_log2 - row_lse) needs: see `Origin` in
//   softmax_rows.cuh. Their P is exp2((S - row_shift) * scale_log2 - row_lse), with the row's maximum as the shift.
// - Rows that see few keys. Where one key has nearly all the probability, dS = P * (dP - delta) nearly vanishes, and with rowsum(dO * O) for
//   delta what is left is what O was rounded by. Plain PyTorch sums up P * dP, whose errors then vanish as well. Among many keys some row
//   of that kind is hidden by others, of which two keys share the probability.
// They are rare, so this is made to be short, not fast.

constexpr int kFewKeys = 64;

__device__ __forceinline__ bool is_huge_lse(float lse) { return !(fabsf(lse) * 1.44269504f < kHuge) && lse != -infinity(); }

template <class Chain>
__device__ __forceinline__ bool sees_few_keys(const Chain& chain, int query) {
    const KeyRange keys = chain.keys(query);
    return keys.begin < keys.end && keys.end - keys.begin <= kFewKeys;
}

// Whether any of kRows rows is huge, of which `rows_valid` exist. All lanes of a warp ask together, here and in the next one.
template <int kRows>
__device__ __forceinline__ bool any_huge_row(const float* lse, int rows_valid) {
    bool huge = false;
#pragma unroll
    for (int row = lane_index(); row < kRows; row += 32) huge |= row < rows_valid && is_huge_lse(lse[row]);
    return vote_sync_any(huge);
}

// Whether any of these rows, from `query` on, sees few keys.
template <int kRows, class Chain>
__device__ __forceinline__ bool any_row_of_few_keys(const Chain& chain, int query, int rows_valid) {
    bool few = false;
#pragma unroll
    for (int row = lane_index(); row < kRows; row += 32) few |= row < rows_valid && sees_few_keys(chain, query + row);
    return vote_sync_any(few);
}

// A row's maximum over some of its keys, and with E = exp2((S - maximum) * scale_log2) the sums of E and of E * dP.
struct RowSum {
    float maximum, sum, d_p;

    __device__ __forceinline__ void add(const RowSum& other, float scale_log2) {
        const float higher = fmaxf(maximum, other.maximum);
        auto factor = [&](float x) { return x == higher ? 1.0f : ex2_approx_ftz((x - higher) * scale_log2); };  // -inf - (-inf) would be NaN
        const float own = factor(maximum), others = factor(other.maximum);
        *this = {higher, sum * own + other.sum * others, d_p * own + other.d_p * others};
    }
};

// The first of some rows of a tensor, and how many there are.
template <class Element>
struct Rows {
    const Element* first;
    i64 stride;
    int count;

    __device__ __forceinline__ const Element* row(int i) const { return i < count ? first + i * stride : nullptr; }
    __device__ __forceinline__ Rows from(int row) const { return {first + row * stride, stride, count - row}; }
};
template <class Element>
Rows(const Element*, i64, int) -> Rows<Element>;

// Two neighbours of a row, as operands of the matrix product hold them; zeros past its end, and of a row that does not exist.
template <int kWidth, class Element>
__device__ __forceinline__ u32 load_pair(const Element* row, int column) {
    return row != nullptr && column < kWidth ? *reinterpret_cast<const u32*>(row + column) : 0;
}

// The product of 16 keys' rows and 8 queries' rows, by the same instructions in the same order as in the main kernel: so both round it alike.
template <int kWidth, class Element>
__device__ __forceinline__ void multiply_rows(float (&product)[4], const Rows<Element>& keys, int first_key, const Rows<Element>& queries) {
    const int own_row = lane_index() / 4, own_column = lane_index() % 4 * 2;
    const Element *const a_rows[2] = {keys.row(first_key + own_row), keys.row(first_key + own_row + 8)}, *const b_row = queries.row(own_row);
#pragma unroll
    for (int e = 0; e < 4; ++e) product[e] = 0.0f;
#pragma unroll 2
    for (int first = 0; first < kWidth; first += 16) {
        u32 a[4], b[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = load_pair<kWidth>(a_rows[i % 2], first + own_column + i / 2 * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) b[i] = load_pair<kWidth>(b_row, first + own_column + i * 8);
        mma_sync_m16n8k16<Element>(product, a, b[0], b[1]);
    }
}

// The sums of 8 queries' rows, from `query` on: of rows lane % 4 * 2 and the next one.
template <int kHeadDim, int kHeadDimV, class Chain, class Element>
__device__ __forceinline__ void sum_rows(RowSum (&rows)[2], const Rows<Element>& q, const Rows<Element>& d_out, const Rows<Element>& k,
                                         const Rows<Element>& v, int query, float scale_log2, const Chain& chain) {
    rows[0] = rows[1] = {-infinity(), 0.0f, 0.0f};
#pragma unroll 1
    for (int first_key = 0; first_key < k.count; first_key += 16) {
        float s[4], d_p[4];
        multiply_rows<kHeadDim>(s, k, first_key, q);
        multiply_rows<kHeadDimV>(d_p, v, first_key, d_out);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (chain.visible(query + lane_index() % 4 * 2 + e % 2, first_key + lane_index() / 4 + e / 2 * 8))
                rows[e % 2].add({s[e], 1.0f, d_p[e]}, scale_log2);
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const RowSum& own = rows[e];
            const RowSum other{shfl_sync_bfly(own.maximum, distance), shfl_sync_bfly(own.sum, distance), shfl_sync_bfly(own.d_p, distance)};
            rows[e].add(other, scale_log2);
        }
}

// Writes row_lse of a tile's huge rows, row_shift, which is 0 for the others, and row_delta of huge rows and those that see few keys. The
// pointers are to the first row of the tile, which is `first_query` of a head. `huge`: whether it has huge rows.
template <int kThreads, int kRows, int kHeadDim, int kHeadDimV, class Sequences, class Chain, class Parameters>
__device__ __forceinline__ void write_exact_rows(float* row_lse, float* row_delta, float* row_shift, const Parameters& p,
                                                 const Sequences& sequences, int batch, int head, int first_query, bool huge,
                                                 const Chain& chain) {
    const Strides of_q{p.q_batch, p.q_head, p.q_row}, of_d_out{p.d_out_batch, p.d_out_head, p.d_out_row};
    const Strides of_k{p.k_batch, p.k_head, p.k_row}, of_v{p.v_batch, p.v_head, p.v_row};
    const int head_kv = divide(head, p.group_reciprocal), queries = sequences.len_q(batch) - first_query;
    const Rows q{sequences.query_row(p.q, of_q, batch, head, first_query), p.q_row, queries};
    const Rows d_out{sequences.query_row(p.d_out, of_d_out, batch, head, first_query), p.d_out_row, queries};
    const i64 place = sequences.first_row(batch, head) + first_query;
#pragma unroll 1
    for (int first = warp_index() * 8; first < kRows; first += kThreads / 4) {
        const int query = first_query + first;
        if (!huge && !any_row_of_few_keys<8>(chain, query, queries - first)) continue;
        const int keys = chain.keys(query + 7).end;  // of 8 queries the last one sees the last keys
        const Rows k{sequences.key_row(p.k, of_k, batch, head_kv, 0), p.k_row, keys};
        const Rows v{sequences.key_row(p.v, of_v, batch, head_kv, 0), p.v_row, keys};
        RowSum sums[2];
        sum_rows<kHeadDim, kHeadDimV>(sums, q.from(first), d_out.from(first), k, v, query, p.scale_log2, chain);
        if (lane_index() >= 4) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = first + lane_index() * 2 + e;
            const bool exists = row < queries, huge_row = exists && is_huge_lse(p.lse[place + row]);
            row_shift[row] = huge_row ? sums[e].maximum : 0.0f;
            if (huge_row) row_lse[row] = log_sum_exp(0.0f, sums[e].sum, {1.0f, 0.0f}) * 1.44269504f;
            if (huge_row || exists && sees_few_keys(chain, first_query + row))
                row_delta[row] = sums[e].d_p / sums[e].sum - (p.d_lse == nullptr ? 0.0f : p.d_lse[place + row]);
        }
    }
}
