// Gradients of modifiers' tensors from their fp32 sums: each block has kThreads * 8 numbers.

__device__ __forceinline__ void store_rounded(float* to, float value) { *to = value; }
template <class Element>
__device__ __forceinline__ void store_rounded(Element* to, float value) {
    to->bits = static_cast<u16>(cvt_rn_x2<Element>(value, 0.0f));
}

// Of nobody's gradient `to` is null.
template <int kThreads, class Element>
__device__ __forceinline__ void round_sums(Element* to, const float* sums, i64 count) {
    const i64 first = static_cast<i64>(block_index()) * (kThreads * 8) + thread_index();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const i64 n = first + i * kThreads;
        if (to != nullptr && n < count) store_rounded(to + n, sums[n]);
    }
}
