// Hints to the compiler about registers: no instructions.

// Launders a value: the compiler can no longer trace it to its origin, nor hoist above this point what is computed from it.
template <class T>
__device__ __forceinline__ void launder(T*& pointer) {
    asm volatile("" : "+l"(pointer));
}
__device__ __forceinline__ void launder(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void launder(u32& value) { asm volatile("" : "+r"(value)); }

// Computes a value at this point, and not where it is used first.
__device__ __forceinline__ void compute_here(float& value) { asm volatile("" : "+f"(value)); }

// Launders a fragment, as CUTLASS's warpgroup_fence_operand: the compiler moves no access to its registers across this point.
template <int kTiles>
__device__ __forceinline__ void launder(float (&fragment)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(fragment[i][j])::"memory");
}
template <int kTiles>
__device__ __forceinline__ void launder(u32 (&fragment)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(fragment[i][j])::"memory");
}
