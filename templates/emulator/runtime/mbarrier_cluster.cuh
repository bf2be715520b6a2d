// Arrivals at mbarriers of other blocks (atoms/emulated/mbarrier_cluster.cuh).

namespace emulator {

void arrive_cluster(ClusterAddress address, bool releases) {
    const ClusterPlace at = place_of(address);
    Mbarrier& barrier = mbarrier_at(at.address, false, at.block);
    const int warp = current->running / kLanes;
    current->cluster.use(at.block, *current, warp, current->clock(warp)[warp]);
    barrier.cluster_scope |= releases && &at.block != current;
    if (!releases) barrier.collected.join_performed(current->warp().seen, current->rank, warp, current->clock(warp)[warp]);
    arrive(barrier, 0, releases);
}

}  // namespace emulator

void mbarrier_arrive_release_cluster(ClusterAddress barrier) { emulator::arrive_cluster(barrier, true); }

void mbarrier_arrive_relaxed_cluster(ClusterAddress barrier) { emulator::arrive_cluster(barrier, false); }
