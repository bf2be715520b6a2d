// Asynchronous copies of contiguous bytes from shared to global memory. PTX ISA, "cp.async.bulk", "cp.async.bulk.wait_group" (sm_90).

// Writes `bytes` bytes, in a group of stores as those of tensor copies (cp_async_bulk_tensor.cuh). Both addresses and the size are
// multiples of 16. Shared memory was written before a fence_proxy_async, and stays as it is until the group has read it.
__device__ __forceinline__ void cp_async_bulk_store(void* destination, SharedAddress source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(destination)), "r"(source),
                 "r"(bytes)
                 : "memory");
}

// Waits until all but kPending of this thread's groups are in global memory: what it releases then says so to others.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
