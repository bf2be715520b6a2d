// Blocks of a cluster, which run at the same time and reach each other's shared memory. PTX ISA, "Special Registers", "mapa" (sm_90).
//
// A block may be reached once a barrier_cluster_sync has shown that it runs, and until it ends.

using ClusterAddress = u32;  // byte address in the shared window of the cluster; a SharedAddress is one, too, of the own block

// Which block of its cluster this one is.
__device__ __forceinline__ int cluster_ctarank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

// The same place in the shared memory of the block of this rank.
__device__ __forceinline__ ClusterAddress mapa_shared_cluster(SharedAddress address, int rank) {
    ClusterAddress mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
