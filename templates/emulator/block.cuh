// A block in the emulator: its threads, each on a fiber, and how they wait for each other: for the other lanes of their warp or warpgroup,
// at a barrier, or for a change of memory.

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

struct Block;
struct Cluster;
inline thread_local Block* current = nullptr;
constexpr int kBarriers = 16, kWarpgroup = 4 * kLanes;

// Who is told what threads do, by the name of the atom: see trace.cuh. Nobody is, elsewhere. `global`: an address there, or null;
// `mbarrier`: where a copy counts its bytes. Hidden: a process has many libraries with a variable of this name, and each has its own.
using Told = void (*)(const char* op, const void* global, std::uint32_t shared, int bytes, std::uint32_t mbarrier);
__attribute__((visibility("hidden"))) inline Told told = nullptr;
inline void tell(const char* op, const void* global = nullptr, std::uint32_t shared = 0, int bytes = 0, std::uint32_t mbarrier = 0) {
    if (told) told(op, global, shared, bytes, mbarrier);
}

// What all copies and waits of one thread need to remember: see atoms/emulated/cp_async.cuh.
struct Copy {
    std::uint32_t destination;
    const void* source;  // null: zeros
    int bytes;
};

struct Thread {
    Wait wait;
    Wait polled;  // the last value that it read of memory that others change
    std::vector<std::vector<Copy>> groups;  // committed asynchronous copies, oldest first
    std::vector<Copy> open;
    int regions = 0;         // of shared memory that it has taken
    int cluster_phase = -1;  // of its cluster's barrier, at which it has arrived and not waited
};

// Where the threads of a warp or warpgroup come together.
struct Meeting {
    int arrived = 0;  // threads, at the collective `op`
    const char* op = nullptr;
    void* operands[kWarpgroup];
};

struct Warp {
    Meeting meeting;
    Clocks seen;       // up to which time of each party this warp has seen what that one did
    Clock synced = 0;  // how often its lanes have met in a way that orders memory
};

struct Barrier {
    int arrived = 0, expected = 0;
    std::vector<int> waiting;  // threads
    Clocks seen;               // by those that have arrived
};

// What a file of atoms keeps for a block, beside what all blocks have.
struct Kept {
    virtual ~Kept() = default;
    virtual void thread_ends(Block&) {}
};

struct Block {
    const Options& options;
    const Progress& progress;  // of its launch
    Fault& fault;
    Scheduler& scheduler;
    Cluster& cluster;
    const int slot, rank, threads;  // slot: which of the resident blocks it is; rank: which of its cluster
    int index = 0, running = 0, ended = 0;  // running: the thread that runs now; ended: threads that have
    Shared shared;

    Block(const Options& options, const Progress& progress, Fault& fault, Scheduler& scheduler, Cluster& cluster, int slot);
    // `current` is one variable for all libraries of a process, which ask it whether a block runs.
    ~Block();

    // All threads of block `number` are at the kernel's begin.
    void begin(int number, void (*kernel)(const void*));
    // Runs a thread until it has to wait, or its end.
    void resume(int thread);
    bool done() const;

    Thread& thread() { return states[running]; }
    Warp& warp() { return warps[running / kLanes]; }
    Warp& warp(int index) { return warps[index]; }
    // What a warp has seen of the parties of this block.
    Clock* clock(int warp) { return warps[warp].seen.of(rank); }

    // The running thread, or all lanes of a warp, in the order of this block's memory.
    Moment now() { return {running, running / kLanes, clock(running / kLanes), warp().synced}; }
    Moment now(int warp) { return {-1, warp, clock(warp), warps[warp].synced}; }
    // The running thread in the order of the memory of a block of its cluster.
    Moment now_in(const Block& other) { return &other == this ? now() : Moment{-1, -1, warp().seen.of(other.rank), 0}; }

    // The one State of this block; its first use makes it.
    template <class State>
    State& kept() {
        static const char type = 0;
        std::unique_ptr<Kept>& state = kept_by_type[&type];
        if (!state) state = std::make_unique<State>();
        return static_cast<State&>(*state);
    }

    // The running thread reads, or writes, these bytes of global memory: `does` says how.
    void require_global(std::uint64_t address, std::uint64_t bytes, bool writes, const char* does);

    // The running thread takes a region of shared memory. In the end all of them must be just what the launch gives the block.
    void claim_region(std::uint32_t address, int bytes);

    // All lanes of the warp meet at `op`. The last one to come does the work for all of them.
    template <class Operand, class Work>
    void meet(const char* op, Operand& own, const Work& work) {
        meet<kLanes>(warp().meeting, op, own, work);
    }
    // All threads of the warpgroup do.
    template <class Operand, class Work>
    void meet_warpgroup(const char* op, Operand& own, const Work& work) {
        if (running / kWarpgroup == static_cast<int>(warpgroups.size()))
            fail("divergence", "is at %s, and the block ends before its warpgroup does", op);
        meet<kWarpgroup>(warpgroups[running / kWarpgroup], op, own, work);
    }

    // What the running warp has done and seen so far, others will have seen who acquire from `clock`.
    void release(Clocks& clocks);
    void acquire(const Clocks& clocks);

    // The thread arrives at a barrier of the block, which is passed once `expected` threads have arrived; it waits for that if `waits`.
    void arrive(int number, int expected, const char* what, bool waits);
    // The running thread goes on once it is woken.
    void wait(const Wait& what);
    void wake(int thread);

    // The running thread waits for the end of the launch that this one overlaps: see Residents::run in runtime/residents.cuh.
    void wait_for_launch(const char* what);
    bool waits_for_launch() const;
    void launch_has_ended();

    // The thread has found something that others change as `polled` says. If that is what it found last it spins, and tries again once
    // something has happened: true. Who waits in this way reads again; who changes such memory says so by `scheduler.stir()`.
    bool spins(const Wait& polled);
    // The same of a `value` in memory.
    bool spins(const char* what, const void* address, std::uint64_t value);

    // Stops the launch: what the running thread does is wrong. Does not return.
    [[gnu::format(printf, 3, 4)]] void fail(const char* check, const char* format, ...);

    const Fiber& running_fiber() const { return fibers[running]; }
    // "block 0: threads 0-31 have ended; threads 32-127 wait at barrier_sync 0"
    std::string waiting() const;

  private:
    Stacks stacks;
    std::vector<Fiber> fibers;
    std::vector<Thread> states;
    std::vector<Warp> warps;
    std::vector<Meeting> warpgroups;
    std::map<const void*, std::unique_ptr<Kept>> kept_by_type;
    std::vector<Barrier> barriers;
    void (*body)(const void*) = nullptr;
    bool has_waited = false;  // for the launch that its own overlaps

    static void run_thread();
    void fail_claim(int bytes, int regions);
    template <int kThreads, class Operand, class Work>
    void meet(Meeting& meeting, const char* op, Operand& own, const Work& work) {
        if (!last_to_meet(meeting, kThreads, op, &own)) return;
        Operand* operands[kThreads];
        for (int i = 0; i < kThreads; ++i) operands[i] = static_cast<Operand*>(meeting.operands[i]);
        work(operands);
        wake_others(kThreads);
    }
    // The running thread comes to a meeting of `count` threads. True for the last one; the others wait until that wakes them.
    bool last_to_meet(Meeting& meeting, int count, const char* op, void* own);
    void wake_others(int count);
    static void clear(Barrier& barrier);
    int number(int thread) const { return slot * threads + thread; }  // among those of all resident blocks
};

}  // namespace emulator
