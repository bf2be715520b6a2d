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

// Where in the shared memory of its block an own address lies. In a cluster an address says of which block it is, too, which a matrix
// descriptor has no room for.
__device__ __forceinline__ SharedAddress offset_in_block(SharedAddress address) { return address & 0xffffff; }
