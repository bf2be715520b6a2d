// Barriers of some of a block's warps, by number: 1 to 15. PTX ISA, "bar, barrier". Number 0 is barrier_sync's.

// Waits until `threads` threads of bar_sync and bar_arrive together have arrived. Whole warps call it.
__device__ __forceinline__ void bar_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void bar_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
