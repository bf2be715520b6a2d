// The barrier of a cluster, and who may still use whose memory: see emulator/cluster.cuh.

namespace emulator {

Cluster::Cluster(int size, int threads) : size(size), threads(size * threads), collected(size), published(size), uses(size, Clocks(size)) {}

void Cluster::begin() {
    phase = arrived = ended = 0;
    waiting.clear(), collected.clear(), published.clear();
    for (Clocks& of_block : uses) of_block.clear();
}

void Cluster::arrive(const char* what) {
    int& own = current->thread().cluster_phase;
    if (own >= 0) current->fail("cluster", "is at %s, and has not waited since it arrived last", what);
    own = phase;
    current->release(collected);
    ++arrived;
    settle();
}

void Cluster::wait(const char* what) {
    int& own = current->thread().cluster_phase;
    if (own < 0) current->fail("cluster", "is at %s, and has not arrived", what);
    if (phase == own) {
        waiting.push_back({current, current->running});
        current->wait({Wait::kForLanes, what});
    }
    own = -1;
    current->acquire(published);
}

void Cluster::require_rank(int rank) const {
    if (rank < 0 || rank >= size) current->fail("cluster", "asks for rank %d of its cluster, which has %d blocks", rank, size);
}

Block& Cluster::reached(int rank) {
    require_rank(rank);
    Block& block = *blocks[rank];
    if (block.ended == block.threads) current->fail("cluster", "reaches for shared memory of block %d, which has ended", block.index);
    return block;
}

void Cluster::use(const Block& block, const Block& user, int party, Clock time) {
    Clock& last = uses[block.rank].of(user.rank)[party];
    last = std::max(last, time);
}

void Cluster::thread_leaves(Block& block) {
    if (block.ended == block.threads) require_unused(block);
    if (block.thread().cluster_phase == phase) --arrived;
    ++ended;
    settle();
}

void Cluster::settle() {
    if (arrived + ended < threads) return;
    ++phase, arrived = 0;
    published.join(collected);
    for (Block* block : blocks)
        for (int warp = 0; warp < block->threads / kLanes; ++warp) ++block->warp(warp).synced;
    for (const auto& [block, thread] : waiting) block->wake(thread);
    waiting.clear();
}

void Cluster::require_unused(Block& block) {
    Clocks known(size);
    for (int warp = 0; warp < block.threads / kLanes; ++warp) known.join(block.warp(warp).seen);
    for (int rank = 0; rank < size; ++rank)
        for (int party = 0; party < kParties; ++party) {
            if (uses[block.rank].of(rank)[party] <= known.of(rank)[party]) continue;
            if (rank == block.rank) block.fail("cluster", "ends the block, and a copy into its shared memory was not waited for");
            block.fail("cluster", "ends the block, and block %d may still %s: there is no barrier of the cluster between",
                       blocks[rank]->index, party < kMatrixUnits ? "arrive at its mbarriers" : "be sent what is in its shared memory");
        }
}

}  // namespace emulator
