// Asynchronous copies from a block's shared memory to another one's of its cluster. PTX ISA, "cp.async.bulk" (sm_90).

// Sends `bytes` bytes, which count at `barrier`, an mbarrier of the block that gets them. Addresses and size are multiples of 16. Threads
// wrote the source before their fence_proxy_async, and leave it as it is until the other block has let them know that the bytes have come.
__device__ __forceinline__ void cp_async_bulk_send(ClusterAddress destination, SharedAddress source, u32 bytes, ClusterAddress barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
                 "r"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}
