// A cluster in the emulator: blocks that run together and reach each other's shared memory, the barrier of all their threads, and who may
// still use whose memory when a block ends.

#include <utility>
#include <vector>

namespace emulator {

struct Cluster {
    std::vector<Block*> blocks;  // by rank

    Cluster(int size, int threads);

    // All of its blocks are at the kernel's begin.
    void begin();

    // The running thread arrives at the barrier of the cluster, and goes on; or waits for all others that have not ended.
    void arrive(const char* what);
    void wait(const char* what);

    void require_rank(int rank) const;
    // The block of this rank, which the running thread is about to reach.
    Block& reached(int rank);
    // The memory of `block` is in use until `time` of a party of `user`: by then it must not have ended.
    void use(const Block& block, const Block& user, int party, Clock time);

    void thread_leaves(Block& block);

  private:
    const int size, threads;                // threads: of all blocks
    int phase = 0, arrived = 0, ended = 0;  // how often the barrier was passed; threads that have arrived since; those that have ended
    std::vector<std::pair<Block*, int>> waiting;  // threads
    Clocks collected, published;                  // by the arrivals of this phase; of those that are complete
    std::vector<Clocks> uses;                     // of the memory of each block

    // Threads that have ended count as arrived, but release nothing.
    void settle();
    // The block ends. Whatever has used its memory, its warps must know to be over: what is so by chance is found as well.
    void require_unused(Block& block);
};

}  // namespace emulator
