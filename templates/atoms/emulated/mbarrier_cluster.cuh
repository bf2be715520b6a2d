// Arrivals at mbarriers of other blocks, and the wait that goes with them: see atoms/ptx/mbarrier_cluster.cuh.

namespace emulator {

inline void arrive_cluster(ClusterAddress address, bool releases) {
    const ClusterPlace at = place_of(address);
    Mbarrier& barrier = mbarrier_at(at.address, false, at.block);
    const int warp = current->running / kLanes;
    current->cluster.use(at.block, *current, warp, current->clock(warp)[warp]);
    barrier.cluster_scope |= releases && &at.block != current;
    if (!releases) barrier.collected.join_performed(current->warp().seen, current->rank, warp, current->clock(warp)[warp]);
    arrive(barrier, 0, releases);
}

}  // namespace emulator

inline void mbarrier_arrive_release_cluster(ClusterAddress barrier) { emulator::arrive_cluster(barrier, true); }

inline void mbarrier_arrive_relaxed_cluster(ClusterAddress barrier) { emulator::arrive_cluster(barrier, false); }

inline bool mbarrier_try_wait_parity_acquire_cluster(SharedAddress barrier, u32 parity) {
    return emulator::try_wait("mbarrier_try_wait_parity_acquire_cluster", barrier, parity, true);
}
