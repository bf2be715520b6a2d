// Prefetches into the L2. PTX ISA, "prefetch".

// Asks for the line at an address in global memory; nobody waits for it. Others may write there meanwhile: the L2 is what all SMs read
// and write.
__device__ __forceinline__ void prefetch_global_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)) : "memory");
}
