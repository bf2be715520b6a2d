// Hints to the compiler about registers: no instructions.

// Launders a value: hides its origin from the optimiser, which then keeps it in a register and does not compute it anew at each use.
template <class T>
__device__ __forceinline__ void launder(T*& pointer) {
    asm volatile("" : "+l"(pointer));
}
__device__ __forceinline__ void launder(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void launder(u32& value) { asm volatile("" : "+r"(value)); }

// Launders a fragment, which counts as read and written here: what the compiler does with it stays before, or comes after.
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
