// A product rounded by itself. PTX ISA, "mul" with a rounding mode: never fused with the addition that follows.

__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
