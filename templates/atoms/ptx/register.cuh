// Hints to the compiler about registers: no instructions.

// Hides where a value came from, so that the compiler keeps it in a register and does not compute it anew at each use.
template <class T>
__device__ __forceinline__ void keep_in_register(T*& pointer) {
    asm volatile("" : "+l"(pointer));
}
__device__ __forceinline__ void keep_in_register(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep_in_register(u32& value) { asm volatile("" : "+r"(value)); }
