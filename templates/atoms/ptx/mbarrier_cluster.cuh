// Arrivals at mbarriers of other blocks of the cluster, and the wait that goes with them. PTX ISA, "mbarrier.arrive", "mbarrier.try_wait"
// (sm_90).
//
// Where only relaxed arrivals and copies of other blocks count, mbarrier_try_wait_parity is enough.

// One arrival. What this thread wrote before is visible to those that wait by mbarrier_try_wait_parity_acquire_cluster. Costs a fence of
// the whole GPU (MEMBAR.GPU).
__device__ __forceinline__ void mbarrier_arrive_release_cluster(ClusterAddress barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival without a fence: it tells that products and copies are over, those that this thread has waited for, or knows of others to
// have waited for. Of what threads did themselves it tells only what a barrier of this block has ordered before, in its own shared memory:
// that is done, in the one place where these bytes are. (The memory model asks for a release there, too, as if they had copies.)
__device__ __forceinline__ void mbarrier_arrive_relaxed_cluster(ClusterAddress barrier) {
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Whether the phase of this parity is complete. May block for a while before it says no; costs the contents of the L1 (CCTL.IVALL) when it
// says yes.
__device__ __forceinline__ bool mbarrier_try_wait_parity_acquire_cluster(SharedAddress barrier, u32 parity) {
    u32 complete;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(complete)
        : "r"(barrier), "r"(parity)
        : "memory");
    return complete != 0;
}
