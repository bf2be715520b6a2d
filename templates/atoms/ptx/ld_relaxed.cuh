// Loads of words of global memory that others may write meanwhile. PTX ISA, "ld" with .relaxed and .gpu (sm_70).

// From where all SMs write. Ordinary loads may have what the L1 holds, and it may go on to hold what they have read.
__device__ __forceinline__ int ld_relaxed_gpu(const int* address) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
    return value;
}
