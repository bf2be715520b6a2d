// Words of global memory that blocks share. PTX ISA, "Memory Consistency Model"; "ld", "st" and "atom" with
// .acquire, .release and .gpu (sm_70).

// What was written before a release of this word, by any thread of the GPU, is seen after a load that reads the released value.
__device__ __forceinline__ u32 ld_acquire_gpu(const u32* address) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
    return value;
}

__device__ __forceinline__ void st_release_gpu(u32* address, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}

// Adds 1, or makes it 0 if it is `last` or more, and orders nothing else: nobody waits for earlier writes. The word as it was before.
__device__ __forceinline__ u32 atom_inc_relaxed_gpu(u32* address, u32 last) {
    u32 before;
    asm volatile("atom.inc.relaxed.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(address)), "r"(last)
                 : "memory");
    return before;
}

// Adds, both an acquire and a release. The word as it was before.
__device__ __forceinline__ u32 atom_add_acq_rel_gpu(u32* address, u32 value) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(address)), "r"(value)
                 : "memory");
    return before;
}
