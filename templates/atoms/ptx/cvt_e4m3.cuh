// Conversion of e4m3 numbers to fp16, which is exact. PTX ISA, "cvt" (.f16x2.e4m3x2: sm_89).

// Four at once: pairs[0] has those of the low half of `four`, pairs[1] those of the high half, and the lower byte's is in the low half of a
// pair.
__device__ __forceinline__ void cvt_f16x2_e4m3x2(u32 (&pairs)[2], u32 four) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(pairs[0]), "=r"(pairs[1])
        : "r"(four));
}

// Conversion of two fp32 numbers to e4m3, to nearest even; what is beyond the largest one, 448, becomes that. PTX ISA, "cvt"
// (.satfinite.e4m3x2: sm_89). `low` goes to the low byte of the result.
__device__ __forceinline__ u32 cvt_rn_satfinite_e4m3x2(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
