// A row of S, or a slice of one that is longer, in the registers of the warps that share the row; and what they find out together.

// Lanes take four neighbouring columns each: first those of the row's first warp, then those of its second one, and so on, kScores / 4
// times.
template <int kScores>
struct RowSlice {
    static constexpr int kChunks = kScores / 4;
    float x[kChunks][4];
    int first, step;  // this lane's first column, and how far its next ones are away

    // `row_warp` is the caller's among the `row_warps` of its row.
    __device__ __forceinline__ RowSlice(int row_warp, int row_warps) : first((row_warp * 32 + lane_index()) * 4), step(row_warps * 128) {}

    __device__ __forceinline__ int columns() const { return step * kChunks; }

    // Reads the slice that begins at `row`. A query that sees `visible` keys from there on has scores of -inf for the others: of those,
    // none is read but the few that share 16 bytes with the last visible one.
    __device__ __forceinline__ void load(const float* row, int visible) {
        int column = first;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const u32 hidden = __float_as_uint(-infinity());
            uint4 four{hidden, hidden, hidden, hidden};
            if (column < visible) four = *reinterpret_cast<const uint4*>(row + column);
            x[i][0] = __uint_as_float(four.x);
            x[i][1] = __uint_as_float(four.y);
            x[i][2] = __uint_as_float(four.z);
            x[i][3] = __uint_as_float(four.w);
            advance(column);
        }
        if (visible % 4 == 0) return;
        column = first;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
#pragma unroll
            for (int e = 1; e < 4; ++e)
                if (column + e >= visible) x[i][e] = -infinity();
            advance(column);
        }
    }

    // This lane's highest. A NaN does not count: it comes back in the sum.
    __device__ __forceinline__ float maximum() const {
        float highest[4] = {x[0][0], x[0][1], x[0][2], x[0][3]};
#pragma unroll
        for (int i = 1; i < kChunks; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) highest[e] = fmaxf(highest[e], x[i][e]);
        return fmaxf(fmaxf(highest[0], highest[1]), fmaxf(highest[2], highest[3]));
    }

    // Scores become exp(softmax_scale * (score - row_max)).
    __device__ __forceinline__ void exponentiate(const Origin& origin, float scale_log2) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[i][e] = ex2_approx_ftz(fmaf(x[i][e] - origin.shift, scale_log2, -origin.row_max));
    }

    // This lane's part of the row sum. In four chains: each addition rounds, and short chains round least.
    __device__ __forceinline__ float row_sum() const {
        float total[4] = {x[0][0], x[0][1], x[0][2], x[0][3]};
#pragma unroll
        for (int i = 1; i < kChunks; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) total[e] += x[i][e];
        return (total[0] + total[1]) + (total[2] + total[3]);
    }

    // Writes columns [0, width) of the slice that begins at `row`, times `factor`, rounded to Element. `width` is a multiple of 4.
    template <class Element>
    __device__ __forceinline__ void store(Element* row, int width, float factor) const {
        int column = first;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const u64 low = cvt_rn_x2<Element>(x[i][0] * factor, x[i][1] * factor);
            const u64 high = cvt_rn_x2<Element>(x[i][2] * factor, x[i][3] * factor);
            if (column < width) *reinterpret_cast<u64*>(row + column) = low | high << 32;
            advance(column);
        }
    }

    // To this lane's next column. Hidden from the compiler, or it would keep all of them in registers from the first pass over a row to the
    // last.
    __device__ __forceinline__ void advance(int& column) const {
        column += step;
        launder(column);
    }
};

struct Maximum {
    static __device__ __forceinline__ float nothing() { return -infinity(); }
    static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};
struct Sum {
    static __device__ __forceinline__ float nothing() { return 0.0f; }
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

template <class Combine>
__device__ __forceinline__ float reduce_warp(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value = Combine::of(value, shfl_sync_bfly(value, distance));
    return value;
}

// Combines the values of all lanes of a row's `row_warps` warps, which are neighbours. All threads of the block take part. `partial` is
// shared memory for a word of each warp, which serves one reduction only.
template <class Combine>
__device__ __forceinline__ float reduce_row(float value, SharedAddress partial, int warp, int row_warp, int row_warps) {
    value = reduce_warp<Combine>(value);
    if (row_warps == 1) return value;
    if (lane_index() == 0) store_shared(partial + warp * 4, __float_as_uint(value));
    barrier_sync();
    const SharedAddress of_row = partial + (warp - row_warp) * 4;
    return reduce_warp<Combine>(lane_index() < row_warps ? __uint_as_float(load_shared(of_row + lane_index() * 4)) : Combine::nothing());
}
