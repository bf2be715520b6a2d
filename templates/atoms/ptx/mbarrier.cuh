// Barriers in shared memory that count arrivals and bytes of asynchronous copies. PTX ISA, "mbarrier" (sm_90). 8 bytes each.
//
// A phase is complete once all arrivals and all announced bytes have come; then the next one begins. Phases are told apart by their
// parity: the first one has parity 0, and waiting for parity 1 at the very beginning returns at once.

// Sets a barrier up for phases of `arrivals`. One thread does it; see fence_mbarrier_init.
__device__ __forceinline__ void mbarrier_init(SharedAddress barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Between the initialisation of barriers and a barrier_sync: makes them known to asynchronous copies.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// One arrival; what this thread wrote before is visible to those that wait.
__device__ __forceinline__ void mbarrier_arrive(SharedAddress barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival that announces `bytes` of asynchronous copies, which must land as well.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(SharedAddress barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity is complete. May block for a while before it says no.
__device__ __forceinline__ bool mbarrier_try_wait_parity(SharedAddress barrier, u32 parity) {
    u32 complete;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(complete)
        : "r"(barrier), "r"(parity)
        : "memory");
    return complete != 0;
}
