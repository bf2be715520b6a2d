// Hints to the compiler about registers: no instructions.

// Hides where a value came from, so that the compiler keeps it in a register and does not compute it anew at each use.
template <class T>
__device__ __forceinline__ void keep_in_register(T*& pointer) {
    asm volatile("" : "+l"(pointer));
}
__device__ __forceinline__ void keep_in_register(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep_in_register(u32& value) { asm volatile("" : "+r"(value)); }

// Marks a fragment as read and written here: what the compiler does with it stays before, or comes after.
template <int kTiles>
__device__ __forceinline__ void keep_in_registers(float (&fragment)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(fragment[i][j])::"memory");
}
template <int kTiles>
__device__ __forceinline__ void keep_in_registers(u32 (&fragment)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(fragment[i][j])::"memory");
}
