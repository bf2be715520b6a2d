// Online softmax of a row's columns, one after the other (Milakov and Gimelshein 2018, algorithm 3, lines 4 and 5).

struct RunningSoftmax {
    float row_max = -infinity(), row_sum = 0.0f;

    __device__ __forceinline__ void add(float x) {
        const float before = row_max;
        row_max = fmaxf(before, x);
        row_sum = row_sum * exponential(before, row_max) + exponential(x, row_max);
    }
};
