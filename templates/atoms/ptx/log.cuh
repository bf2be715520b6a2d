// Natural logarithm to 1 ulp. No single instruction: lg2.approx is good to 22 bits only.

__device__ __forceinline__ float natural_log(float x) { return logf(x); }
