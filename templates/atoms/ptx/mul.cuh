// Products. PTX ISA, "mul".

// Rounded by itself: never fused with the addition that follows.
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }

// The upper 64 of the product's 128 bits.
__device__ __forceinline__ u64 mul_hi(u64 a, u64 b) { return __umul64hi(a, b); }
