// Rows whose log-sum-exp is so large that fp32 has lost what P = exp2(S * scale_log2 - row_lse) needs: see `Origin` in softmax_rows.cuh.
// Their P is exp2((S - row_shift) * scale_log2 - row_lse), with the row's maximum as the shift. The forward pass does not save that, so it
// is computed again. They are rare, so this is made to be short, not fast.

__device__ __forceinline__ bool is_huge_lse(float lse) { return !(fabsf(lse) * 1.44269504f < kHuge) && lse != -infinity(); }

// Whether any of kRows rows is huge, of which `rows_valid` exist. All lanes of a warp ask together.
template <int kRows>
__device__ __forceinline__ bool any_huge_row(const float* lse, int rows_valid) {
    bool huge = false;
#pragma unroll
    for (int row = lane_index(); row < kRows; row += 32) huge |= row < rows_valid && is_huge_lse(lse[row]);
    return vote_sync_any(huge);
}

// A row's maximum, and the sum of exp2((S - maximum) * scale_log2), over some of its keys.
struct RowSum {
    float maximum, sum;

    __device__ __forceinline__ void add(const RowSum& other, float scale_log2) {
        const float higher = fmaxf(maximum, other.maximum);
        auto rescaled = [&](const RowSum& x) {  // -inf - (-inf) would be NaN
            return x.maximum == higher ? x.sum : x.sum * ex2_approx_ftz((x.maximum - higher) * scale_log2);
        };
        *this = {higher, rescaled(*this) + rescaled(other)};
    }
};

// Two neighbours of a row, as operands of the matrix product hold them; zeros past its end.
template <int kWidth, class Element>
__device__ __forceinline__ u32 load_pair(const Element* row, int column, bool exists) {
    return exists && column < kWidth ? *reinterpret_cast<const u32*>(row + column) : 0;
}

// The sums of 8 queries' rows, from `query` on: of rows lane % 4 * 2 and the next one. Their scores come from the same products as those in
// the gradients do, so that both round them alike.
template <int kHeadDim, class Chain, class Element>
__device__ __forceinline__ void sum_rows(RowSum (&rows)[2], const Element* q, i64 q_stride, int query, int queries_valid, const Element* k,
                                         i64 k_stride, int len_kv, float scale_log2, const Chain& chain) {
    const int lane = lane_index(), own_row = lane / 4, own_column = lane % 4 * 2;
    rows[0] = rows[1] = {-infinity(), 0.0f};
    for (int first_key = 0; first_key < len_kv; first_key += 16) {
        float s[4] = {};
        const int key = first_key + own_row;
#pragma unroll 1
        for (int column = own_column; column < (kHeadDim + 15) / 16 * 16; column += 16) {
            u32 a[4], b[2];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                a[i] = load_pair<kHeadDim>(k + (key + i % 2 * 8) * k_stride, column + i / 2 * 8, key + i % 2 * 8 < len_kv);
#pragma unroll
            for (int i = 0; i < 2; ++i) b[i] = load_pair<kHeadDim>(q + own_row * q_stride, column + i * 8, own_row < queries_valid);
            mma_sync_m16n8k16<Element>(s, a, b[0], b[1]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (chain.visible(query + own_column + e % 2, key + e / 2 * 8)) rows[e % 2].add({s[e], 1.0f}, scale_log2);
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            rows[e].add({shfl_sync_bfly(rows[e].maximum, distance), shfl_sync_bfly(rows[e].sum, distance)}, scale_log2);
}

// Writes row_shift of 8 rows, 0 for those that are not huge, and row_lse of those that are. All pointers are to the first of the rows.
__device__ __forceinline__ void write_row_shifts(float* row_shift, float* row_lse, const RowSum (&rows)[2], const float* lse,
                                                 int rows_valid) {
    if (lane_index() >= 4) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int row = lane_index() * 2 + e;
        const bool huge = row < rows_valid && is_huge_lse(lse[row]);
        row_shift[row] = huge ? rows[e].maximum : 0.0f;
        if (huge) row_lse[row] = log_sum_exp(0.0f, rows[e].sum, {1.0f, 0.0f}) * 1.44269504f;
    }
}
