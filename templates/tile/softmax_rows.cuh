// What every form of the online softmax needs of a row, whose scores four neighbouring lanes hold.

// How far above its reference a score may lie before a reference that follows the maximum does so: fp16 still holds a probability of 2^8.
constexpr float kHeadroom = 8.0f;

// The reference of a row that has seen no key yet: its scores are all -inf, and -inf - (-inf) would be NaN. Any finite score outgrows it.
constexpr float kNoReference = -3.0e38f;

// The highest of this lane's scores of row lane/4 + h*8. In two chains: one would be twice as long.
template <int kKeyTiles>
__device__ __forceinline__ float lane_maximum(const float (&scores)[kKeyTiles][4], int h) {
    float chain[2] = {fmaxf(scores[0][h * 2], scores[0][h * 2 + 1]), fmaxf(scores[1][h * 2], scores[1][h * 2 + 1])};
#pragma unroll
    for (int j = 2; j < kKeyTiles; ++j) chain[j % 2] = fmaxf(chain[j % 2], fmaxf(scores[j][h * 2], scores[j][h * 2 + 1]));
    return fmaxf(chain[0], chain[1]);
}

// Of the four lanes' values, the highest, and the sum.
__device__ __forceinline__ float row_maximum(float value) {
    value = fmaxf(value, shfl_sync_bfly(value, 1));
    return fmaxf(value, shfl_sync_bfly(value, 2));
}
__device__ __forceinline__ float row_sum(float value) {
    value += shfl_sync_bfly(value, 1);
    return value + shfl_sync_bfly(value, 2);
}

// What a row's output is multiplied with in the end: 1 / total, to 1 ulp; 0 for a row that saw no key. A guess that is good to 5 %, and Newton's
// method three times: a division would bring a branch, and rcp.approx differ from machine to machine.
__device__ __forceinline__ float normaliser(float total) {
    float y = __int_as_float(0x7ef311c3 - __float_as_int(total));
#pragma unroll
    for (int i = 0; i < 3; ++i) y = fmaf(y, fmaf(-total, y, 1.0f), y);
    return total == 0.0f ? 0.0f : y;
}
