// Conversion of a pair of 16-bit elements to two fp32 values, which is exact. PTX ISA, "cvt".

// `low` comes from the low half of the pair.
template <class Element>
__device__ __forceinline__ void cvt_f32_x2(float& low, float& high, u32 pair);

template <>
__device__ __forceinline__ void cvt_f32_x2<Bf16>(float& low, float& high, u32 pair) {  // bf16 is the upper half of fp32
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
}

template <>
__device__ __forceinline__ void cvt_f32_x2<Fp16>(float& low, float& high, u32 pair) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}" : "=f"(low), "=f"(high) : "r"(pair));
}
