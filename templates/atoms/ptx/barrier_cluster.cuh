// The barrier of all threads of a cluster. PTX ISA, "barrier.cluster" (sm_90). Each thread arrives, then waits; those that have ended count
// as arrived. Lanes of a warp need not come together. An arrival costs a fence of the whole GPU (MEMBAR.GPU), a wait the contents of the
// L1 (CCTL.IVALL): this is for a kernel's begin and end.

// What this thread wrote before is visible to those that wait.
__device__ __forceinline__ void barrier_cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

__device__ __forceinline__ void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ __forceinline__ void barrier_cluster_sync() {
    barrier_cluster_arrive();
    barrier_cluster_wait();
}
