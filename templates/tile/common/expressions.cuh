// What expressions of traced functions (codegen/expressions/cxx.py) call: operators that C++ lacks, with PyTorch's meaning, and the
// elements of captured tensors. Functions of <math.h> are those that NVRTC has built in.

// Integers that may overflow wrap.
__device__ __forceinline__ int wrapped_add(int a, int b) { return static_cast<int>(static_cast<u32>(a) + static_cast<u32>(b)); }
__device__ __forceinline__ int wrapped_sub(int a, int b) { return static_cast<int>(static_cast<u32>(a) - static_cast<u32>(b)); }
__device__ __forceinline__ int wrapped_mul(int a, int b) { return static_cast<int>(static_cast<u32>(a) * static_cast<u32>(b)); }
__device__ __forceinline__ int wrapped_neg(int a) { return static_cast<int>(0u - static_cast<u32>(a)); }
__device__ __forceinline__ i64 wrapped_add(i64 a, i64 b) { return static_cast<i64>(static_cast<u64>(a) + static_cast<u64>(b)); }
__device__ __forceinline__ i64 wrapped_sub(i64 a, i64 b) { return static_cast<i64>(static_cast<u64>(a) - static_cast<u64>(b)); }
__device__ __forceinline__ i64 wrapped_mul(i64 a, i64 b) { return static_cast<i64>(static_cast<u64>(a) * static_cast<u64>(b)); }
__device__ __forceinline__ i64 wrapped_neg(i64 a) { return static_cast<i64>(0ull - static_cast<u64>(a)); }

template <class Integer>
__device__ __forceinline__ Integer absolute(Integer a) {
    return a < 0 ? wrapped_neg(a) : a;
}
// NaN where one of both is.
template <class Number>
__device__ __forceinline__ Number smaller(Number a, Number b) {
    return a < b || a != a ? a : b;
}
template <class Number>
__device__ __forceinline__ Number larger(Number a, Number b) {
    return a > b || a != a ? a : b;
}
template <class Number>
__device__ __forceinline__ Number sign_of(Number a) {
    return static_cast<Number>((a > 0) - (a < 0));
}

// Rounded down, and the remainder with the divisor's sign. By 0, which PyTorch refuses or leaves open, 0.
template <class Integer>
__device__ __forceinline__ Integer floor_div(Integer a, Integer b) {
    if (b == 0) return 0;
    if (b == -1) return wrapped_neg(a);
    const Integer quotient = a / b;
    return quotient - (a % b != 0 && (a < 0) != (b < 0));
}
template <class Integer>
__device__ __forceinline__ Integer floor_mod(Integer a, Integer b) {
    if (b == 0 || b == -1) return 0;
    const Integer rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
__device__ __forceinline__ float floor_mod(float a, float b) {
    const float rest = fmodf(a, b);
    return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
}
__device__ __forceinline__ float floor_div(float a, float b) {
    if (b == 0.0f) return a / b;
    const float rest = fmodf(a, b);
    float quotient = (a - rest) / b;
    if (rest != 0.0f && (rest < 0.0f) != (b < 0.0f)) quotient -= 1.0f;
    if (quotient == 0.0f) return copysignf(0.0f, a / b);
    const float floored = floorf(quotient);
    return quotient - floored > 0.5f ? floored + 1.0f : floored;
}

// By a negative number, or by more than there are bits: 0, or the sign.
template <class Integer>
__device__ __forceinline__ Integer shifted_left(Integer a, Integer by) {
    return by >= 0 && by < static_cast<int>(sizeof(a) * 8) ? static_cast<Integer>(static_cast<u64>(a) << by) : 0;
}
template <class Integer>
__device__ __forceinline__ Integer shifted_right(Integer a, Integer by) {
    return by >= 0 && by < static_cast<int>(sizeof(a) * 8) ? a >> by : a < 0 ? -1 : 0;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float reciprocal_sqrt(float x) { return 1.0f / sqrtf(x); }

// An element as expressions compute with it.
__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ i64 widened(i64 x) { return x; }
__device__ __forceinline__ int widened(int x) { return x; }
__device__ __forceinline__ int widened(short x) { return x; }
__device__ __forceinline__ int widened(signed char x) { return x; }
__device__ __forceinline__ int widened(unsigned char x) { return x; }
__device__ __forceinline__ bool widened(bool x) { return x; }
template <class Element>
__device__ __forceinline__ float widened(Element x) {
    float low, high;
    cvt_f32_x2<Element>(low, high, x.bits);
    return low;
}

// A captured tensor, in memory in any way, of at least one element. A negative index counts from the end. One out of range, as padded
// queries and keys may give, reads the nearest element.
template <class Element, int kRank>
struct CapturedTensor {
    const Element* first;
    int sizes[kRank == 0 ? 1 : kRank], strides[kRank == 0 ? 1 : kRank];  // in elements; no element is 2^31 of them away

    template <class... Indices>
    __device__ __forceinline__ auto at(Indices... indices) const {
        static_assert(sizeof...(indices) == kRank, "an index for each dimension");
        int offset = 0;
        int dimension = 0;
        ((offset += in_range(indices, sizes[dimension]) * strides[dimension], ++dimension), ...);
        return widened(first[offset]);
    }

    template <class Index>
    __device__ __forceinline__ static int in_range(Index index, int size) {
        const Index from_start = index < 0 ? index + size : index;
        return from_start < 0 ? 0 : from_start < size ? static_cast<int>(from_start) : size - 1;
    }
};
