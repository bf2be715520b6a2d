// The barrier of a cluster: see atoms/ptx/barrier_cluster.cuh.

inline void barrier_cluster_arrive() { emulator::current->cluster.arrive("barrier_cluster_arrive"); }

inline void barrier_cluster_wait() { emulator::current->cluster.wait("barrier_cluster_wait"); }

inline void barrier_cluster_sync() {
    barrier_cluster_arrive();
    barrier_cluster_wait();
}
