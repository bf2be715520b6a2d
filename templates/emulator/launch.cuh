// A launch as it is asked for: the kernel, which blocks run and how, how far it is. The function that runs it is compiled apart, once for
// all texts: it takes a compiler longer than a kernel does.

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace emulator {

constexpr int kRegistersPerSm = 65536;

// Of a thread of the kernel that runs on this thread of the operating system, by its launch bounds; 0 if nothing is known of them.
inline thread_local int registers_at_launch = 0;

struct Options {
    const Extent* extents;  // of global memory that atoms may touch; none given: they may touch all
    std::uint64_t seed;
    double stall_seconds, limit_seconds;  // see runtime/isolate.cuh; 0: none
    int extent_count;
    int schedule, late_copies;  // late_copies: asynchronous copies take place when they are waited for, not when they are issued
    int workers;                // threads of the operating system
    int isolated;               // in a process of their own
};

// A kernel of the text, its launch bounds (threads of a block, and blocks on an SM), and the blocks of a cluster; 0 if nothing is known of
// them.
struct Kernel {
    void (*run)(const void* parameters);
    int threads, blocks_per_sm, cluster;

    int registers() const { return threads ? kRegistersPerSm / (threads * blocks_per_sm) / 8 * 8 : 0; }
};

// One launch of a kernel, as it is asked for.
struct Launch {
    const void* parameters;
    int kernel;                 // its number in the text
    int threads, shared_bytes;  // of a block
    int first_block, blocks;    // which blocks run
    int resident;               // how many of them run together: those that wait for each other must
    int cluster;                // blocks of a cluster, of which only whole ones run, and are resident
    int waits_for_begun;        // blocks may wait for others that have begun, and that go on meanwhile

    int end_block() const { return first_block + blocks; }
};

// How far a launch is. One that overlaps the launch before it may not rely on any of that before its blocks have waited for its end.
struct Progress {
    const Launch& launch;
    const Progress* const before;  // the launch that it overlaps; null if it overlaps none
    std::atomic<int> begun, ended{0};  // the next block to begin; blocks that have ended

    Progress(const Launch& launch, const Progress* before) : launch(launch), before(before), begun(launch.first_block) {}

    int under_way() const { return std::min<int>(begun, launch.end_block()) - launch.first_block - ended; }  // blocks
    bool all_begun() const { return begun >= launch.end_block(); }
    bool all_ended() const { return ended == launch.blocks; }
    bool alone() const { return !before || before->all_ended(); }  // nothing that it overlaps is under way
};

// Runs launches, each of which overlaps the one before it: those of a chain end together. Says in `fault` which check failed, if one did.
void run(const Options& options, const Launch* launches, int count, const Kernel* kernels, Fault& fault);

}  // namespace emulator
