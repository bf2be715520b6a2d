// Comparison of two pairs of fp16 numbers. PTX ISA, "set" (.f16x2).

// In each half of the result all bits are set where that half of a is less than that of b, and none where it is not, or one is NaN.
__device__ __forceinline__ u32 set_lt_f16x2(u32 a, u32 b) {
    u32 less;
    asm("set.lt.u32.f16x2 %0, %1, %2;" : "=r"(less) : "r"(a), "r"(b));
    return less;
}
