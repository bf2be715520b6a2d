// Asynchronous copies of contiguous bytes from global to shared memory. PTX ISA, "cp.async.bulk" (sm_90).

// Reads `bytes` bytes, which count at `barrier`. Both addresses and the size are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_load(SharedAddress destination, const void* source, u32 bytes, SharedAddress barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
                 "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Between what this thread has acquired of global memory and its asynchronous reads of that.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
