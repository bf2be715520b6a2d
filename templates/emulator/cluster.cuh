// A cluster in the emulator: blocks that run together and reach each other's shared memory, the barrier of all their threads, and who may
// still use whose memory when a block ends.

#include <utility>
#include <vector>

namespace emulator {

struct Cluster {
    std::vector<Block*> blocks;  // by rank

    Cluster(int size, int threads) : size(size), threads(size * threads), collected(size), published(size), uses(size, Clocks(size)) {}

    // All of its blocks are at the kernel's begin.
    void begin() {
        phase = arrived = ended = 0;
        waiting.clear(), collected.clear(), published.clear();
        for (Clocks& of_block : uses) of_block.clear();
    }

    // The running thread arrives at the barrier of the cluster, and goes on; or waits for all others that have not ended.
    void arrive(const char* what) {
        int& own = current->thread().cluster_phase;
        if (own >= 0) current->fail("cluster", "is at %s, and has not waited since it arrived last", what);
        own = phase;
        current->release(collected);
        ++arrived;
        settle();
    }
    void wait(const char* what) {
        int& own = current->thread().cluster_phase;
        if (own < 0) current->fail("cluster", "is at %s, and has not arrived", what);
        if (phase == own) {
            waiting.push_back({current, current->running});
            current->wait({Wait::kForLanes, what});
        }
        own = -1;
        current->acquire(published);
    }

    void require_rank(int rank) const {
        if (rank < 0 || rank >= size) current->fail("cluster", "asks for rank %d of its cluster, which has %d blocks", rank, size);
    }
    // The block of this rank, which the running thread is about to reach.
    Block& reached(int rank) {
        require_rank(rank);
        Block& block = *blocks[rank];
        if (block.ended == block.threads) current->fail("cluster", "reaches for shared memory of block %d, which has ended", block.index);
        return block;
    }
    // The memory of `block` is in use until `time` of a party of `user`: by then it must not have ended.
    void use(const Block& block, const Block& user, int party, Clock time) {
        Clock& last = uses[block.rank].of(user.rank)[party];
        last = std::max(last, time);
    }

    void thread_leaves(Block& block) {
        if (block.ended == block.threads) require_unused(block);
        if (block.thread().cluster_phase == phase) --arrived;
        ++ended;
        settle();
    }

  private:
    const int size, threads;                // threads: of all blocks
    int phase = 0, arrived = 0, ended = 0;  // how often the barrier was passed; threads that have arrived since; those that have ended
    std::vector<std::pair<Block*, int>> waiting;  // threads
    Clocks collected, published;                  // by the arrivals of this phase; of those that are complete
    std::vector<Clocks> uses;                     // of the memory of each block

    // Threads that have ended count as arrived, but release nothing.
    void settle() {
        if (arrived + ended < threads) return;
        ++phase, arrived = 0;
        published.join(collected);
        for (Block* block : blocks)
            for (int warp = 0; warp < block->threads / kLanes; ++warp) ++block->warp(warp).synced;
        for (const auto& [block, thread] : waiting) block->wake(thread);
        waiting.clear();
    }
    // The block ends. Whatever has used its memory, its warps must know to be over: what is so by chance is found as well.
    void require_unused(Block& block) {
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
};

inline void thread_leaves(Cluster& cluster, Block& block) { cluster.thread_leaves(block); }

}  // namespace emulator
