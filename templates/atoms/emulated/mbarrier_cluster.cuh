// Arrivals at mbarriers of other blocks, and the wait that goes with them: see atoms/ptx/mbarrier_cluster.cuh.

void mbarrier_arrive_release_cluster(ClusterAddress barrier);

void mbarrier_arrive_relaxed_cluster(ClusterAddress barrier);

inline bool mbarrier_try_wait_parity_acquire_cluster(SharedAddress barrier, u32 parity) {
    return emulator::try_wait("mbarrier_try_wait_parity_acquire_cluster", barrier, parity, true);
}
