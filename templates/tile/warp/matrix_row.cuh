// Which row of a matrix a warp works on, and the exponential of a softmax.

// A row belongs to `row_warps` neighbouring warps of a block, a power of two. This lane has the columns from `first` on, `step` apart:
// neighbouring lanes read neighbouring columns. A row that is not there has no columns.
struct MatrixRow {
    const Element* x;
    Element* y;
    int columns, first, step, warp, row_warp, row_warps;

    template <int kWarps>
    __device__ __forceinline__ static MatrixRow of(const Parameters& p) {
        const int warp = warp_index(), row_warp = warp % p.row_warps;
        const int row = block_index() * (kWarps / p.row_warps) + warp / p.row_warps;
        const int head_and_batch = divide(row, p.len_q_reciprocal), query = row - head_and_batch * p.len_q;
        const int batch = divide(head_and_batch, p.heads_q_reciprocal), head = head_and_batch - batch * p.heads_q;
        return {p.x + batch * p.x_batch + head * p.x_head + query * p.x_row,
                p.y + batch * p.y_batch + head * p.y_head + query * p.y_row,
                row < p.rows ? p.columns : 0,
                row_warp * 32 + lane_index(),
                p.row_warps * 32,
                warp,
                row_warp,
                p.row_warps};
    }

    __device__ __forceinline__ float load(int column) const { return load_element(x + column); }
    __device__ __forceinline__ void store(int column, float value) const { store_element(y + column, value); }
    // Combines the lanes' values of this row. `partial`: see reduce_row.
    template <class Combine>
    __device__ __forceinline__ float reduce(float value, SharedAddress partial) const {
        return reduce_row<Combine>(value, partial, warp, row_warp, row_warps);
    }
};

// exp(x - row_max). Of a row of -inf it is 0: -inf - (-inf) would be NaN.
__device__ __forceinline__ float exponential(float x, float row_max) {
    constexpr float kLog2E = 1.44269504f;
    return ex2_approx_ftz((x - (row_max == -infinity() ? 0.0f : row_max)) * kLog2E);
}
