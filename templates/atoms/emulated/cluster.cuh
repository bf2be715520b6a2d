// Blocks of a cluster: see atoms/ptx/cluster.cuh. The upper 8 bits of an address are the rank plus 1, or 0 for the own block, so that an
// ordinary access to another block's lies outside of all memory.

using ClusterAddress = u32;

namespace emulator {

constexpr int kRankShift = 24;
constexpr u32 kOffsetMark = 1u << 23;  // of an address that offset_in_block gave: only matrix descriptors take those

// A place in shared memory, and whose it is.
struct ClusterPlace {
    Block& block;
    SharedAddress address;
};

inline ClusterPlace place_of(ClusterAddress address) {
    const int rank = static_cast<int>(address >> kRankShift) - 1;
    return {rank < 0 ? *current : current->cluster.reached(rank), address & ((1u << kRankShift) - 1)};
}

}  // namespace emulator

inline int cluster_ctarank() { return emulator::current->rank; }

inline ClusterAddress mapa_shared_cluster(SharedAddress address, int rank) {
    emulator::current->cluster.require_rank(rank);
    if (address >> emulator::kRankShift) emulator::current->fail("cluster", "maps %u, no address in its own shared memory", address);
    return static_cast<u32>(rank + 1) << emulator::kRankShift | address;
}

inline SharedAddress offset_in_block(SharedAddress address) { return emulator::kOffsetMark | address; }
