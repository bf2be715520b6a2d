// A barrier of some of a block's warps that they reach in code of their own. PTX ISA, "bar, barrier": bar.sync is barrier.sync.aligned,
// which all of them are to reach at one instruction.

// Waits until `threads` have arrived; whole warps take part.
__device__ __forceinline__ void barrier_sync_unaligned(int number, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
