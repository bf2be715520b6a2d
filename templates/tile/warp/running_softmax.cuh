// Online softmax: the maximum and the sum of the columns so far (Milakov and Gimelshein 2018, algorithm 3, lines 4 and 5).

struct RunningSoftmax {
    float row_max = -infinity(), row_sum = 0.0f;

    // Takes in kCount of the lane's columns, from `column` on; one that is not there counts as -inf. With one it is the paper's step; with
    // several the sum is rescaled once for all of them.
    template <int kCount>
    __device__ __forceinline__ void add(const MatrixRow& row, int column) {
        float x[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] = column + i * row.step < row.columns ? row.load(column + i * row.step) : -infinity();
        const float before = row_max;
#pragma unroll
        for (int i = 0; i < kCount; ++i) row_max = fmaxf(row_max, x[i]);
        row_sum *= exponential(before, row_max);
#pragma unroll
        for (int i = 0; i < kCount; ++i) row_sum += exponential(x[i], row_max);
    }
};
