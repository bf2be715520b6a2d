// A block on the host: its threads, each on a fiber, what they wait for (the other lanes of their warp, a barrier, or a change of memory), and
// the report of what went wrong.

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

namespace host {

constexpr int kBarriers = 16;

struct Extent {
    std::uint64_t address, bytes;
};

struct Options {
    const Extent* extents;  // global memory that copies may read; none given: they may read all
    std::uint64_t seed;
    int extent_count;
    int schedule, late_copies;  // late_copies: asynchronous copies take place when they are waited for, not when they are issued
    int workers;                // threads of the operating system
    int first_block, blocks;    // which blocks run
    int resident;               // how many of them run together: those that wait for each other must
};

// Why a launch was stopped: the check that failed, and a message for people.
struct Fault {
    std::atomic<bool> found{false};
    std::mutex mutex;
    std::string check, message;

    // The first one counts.
    void report(const char* failed, const std::string& text) {
        const std::lock_guard<std::mutex> guard(mutex);
        if (found) return;
        check = failed, message = text;
        found = true;
    }
};

// What all copies and waits of one thread need to remember: see atoms/host/cp_async.cuh.
struct Copy {
    std::uint32_t destination;
    const void* source;  // null: zeros
};

// Why a thread does not run.
struct Wait {
    enum Kind { kNone, kForLanes, kAtBarrier, kOnMemory, kEnded } kind = kNone;
    const char* at = nullptr;     // the atom
    std::uint64_t which = 0;      // barrier, or address
    std::uint64_t value = 0;      // that does not change

    bool operator==(const Wait& other) const {
        return kind == other.kind && at == other.at && which == other.which && value == other.value;
    }
    std::string text() const {
        char text[200] = "can go on";
        if (kind == kForLanes) std::snprintf(text, sizeof text, "wait at %s", at);
        if (kind == kAtBarrier) std::snprintf(text, sizeof text, "wait at %s %d", at, static_cast<int>(which));
        if (kind == kOnMemory)
            std::snprintf(text, sizeof text, "spin at %s of 0x%llx, which stays %llu", at, static_cast<unsigned long long>(which),
                          static_cast<unsigned long long>(value));
        if (kind == kEnded) return "have ended";
        return text;
    }
};

struct Thread {
    Wait wait;
    Wait polled;  // the last value that it read of memory that others change
    std::vector<std::vector<Copy>> groups;  // committed asynchronous copies, oldest first
    std::vector<Copy> open;
};

struct Warp {
    int arrived = 0;  // lanes, at the collective `op`
    const char* op = nullptr;
    void* operands[kLanes];
    Clock clock[kMaxWarps] = {};  // clock[w]: up to which time of warp w this warp has seen what that one did
    Clock synced = 0;             // how often its lanes have met in a way that orders memory
};

struct Barrier {
    int arrived = 0, expected = 0;
    std::vector<int> waiting;  // threads
};

struct Block;
inline thread_local Block* current = nullptr;

struct Block {
    const Options& options;
    Fault& fault;
    Scheduler& scheduler;
    const int place, threads;  // place: which of the resident blocks it is
    int index = 0, running = 0;  // running: the thread that runs now
    Shared shared;

    Block(const Options& options, Fault& fault, Scheduler& scheduler, int place, int threads, int shared_bytes)
        : options(options), fault(fault), scheduler(scheduler), place(place), threads(threads), shared(shared_bytes), fibers(threads) {}

    // All threads of block `number` are at the kernel's begin.
    void begin(int number, void (*kernel)(const void*), const void* parameters) {
        index = number, body = kernel, arguments = parameters;
        shared.clear();
        for (Barrier& barrier : barriers) barrier = Barrier{};
        states.assign(threads, Thread{});
        warps.assign(threads / kLanes, Warp{});
        for (std::size_t w = 0; w < warps.size(); ++w) warps[w].clock[w] = 1;
        for (int i = 0; i < threads; ++i) {
            fibers[i].begin(run_thread);
            wake(i);
        }
    }
    // Runs a thread until it has to wait, or its end.
    void resume(int thread) {
        current = this, running = thread;
        fibers[thread].resume();
    }
    bool done() const {
        for (const Thread& thread : states)
            if (thread.wait.kind != Wait::kEnded) return false;
        return true;
    }

    Thread& thread() { return states[running]; }
    Warp& warp() { return warps[running / kLanes]; }

    // All lanes of the warp meet at `op`. The last one to come does the work for all of them.
    template <class Operand, class Work>
    void meet(const char* op, Operand& own, const Work& work) {
        Warp& warp = this->warp();
        if (warp.arrived && std::strcmp(warp.op, op))
            fail("divergence", "is at %s while another lane of its warp is at %s", op, warp.op);
        warp.op = op;
        warp.operands[running % kLanes] = &own;
        if (++warp.arrived < kLanes) return wait({Wait::kForLanes, op});
        warp.arrived = 0;
        Operand* operands[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) operands[lane] = static_cast<Operand*>(warp.operands[lane]);
        work(operands);
        const int first = running / kLanes * kLanes;
        for (int lane = 0; lane < kLanes; ++lane)
            if (first + lane != running) wake(first + lane);
    }

    // The thread waits at a barrier of the block, which `expected` threads pass together.
    void arrive(int number, int expected, const char* what) {
        Barrier& barrier = barriers[number];
        if (barrier.arrived && barrier.expected != expected)
            fail("divergence", "says that barrier %d has %d threads, and another said %d", number, expected, barrier.expected);
        barrier.expected = expected;
        barrier.waiting.push_back(running);
        if (++barrier.arrived < expected) return wait({Wait::kAtBarrier, what, static_cast<std::uint64_t>(number)});
        Clock seen[kMaxWarps] = {};
        for (int thread : barrier.waiting)
            for (std::size_t w = 0; w < warps.size(); ++w) seen[w] = std::max(seen[w], warps[thread / kLanes].clock[w]);
        for (int thread : barrier.waiting) {
            Warp& warp = warps[thread / kLanes];
            std::memcpy(warp.clock, seen, sizeof seen);
        }
        for (int thread : barrier.waiting) {
            Warp& warp = warps[thread / kLanes];
            warp.clock[thread / kLanes] = seen[thread / kLanes] + 1;
            if (thread % kLanes == 0) ++warp.synced;
            if (thread != running) wake(thread);
        }
        barrier = Barrier{};
    }

    // The thread has read `value` of memory that others change. If that is what it has read there last it spins, and tries again once
    // something has happened: true. Who waits in this way reads again; who changes such memory says so by `scheduler.stir()`.
    bool spins(const char* what, const void* address, std::uint64_t value) {
        const Wait polled{Wait::kOnMemory, what, bits_as<std::uintptr_t>(address), value};
        const bool same = polled == thread().polled;
        thread().polled = polled;
        if (!same) return false;
        thread().wait = polled;
        scheduler.set_aside(number(running));
        fibers[running].suspend();
        thread().wait = Wait{};
        return true;
    }

    // Stops the launch. Does not return.
    [[gnu::format(printf, 3, 4)]] void fail(const char* check, const char* format, ...) {
        char text[1600];
        va_list values;
        va_start(values, format);
        std::vsnprintf(text, sizeof text, format, values);
        va_end(values);
        fault.report(check, "block " + std::to_string(index) + ": thread " + std::to_string(running) + " (warp " +
                                std::to_string(running / kLanes) + ", lane " + std::to_string(running % kLanes) + ") " + text);
        fibers[running].suspend();
        std::abort();  // a launch that failed goes on nowhere
    }

    // "block 0: threads 0-31 have ended; threads 32-127 wait at barrier_sync 0"
    std::string waiting() const {
        std::string text = "block " + std::to_string(index) + ": ";
        for (int first = 0; first < threads;) {
            int end = first + 1;
            while (end < threads && states[end].wait == states[first].wait) ++end;
            text += (first ? "; threads " : "threads ") + std::to_string(first) + "-" + std::to_string(end - 1) + " " + states[first].wait.text();
            first = end;
        }
        return text;
    }

  private:
    std::vector<Fiber> fibers;
    std::vector<Thread> states;
    std::vector<Warp> warps;
    Barrier barriers[kBarriers];
    void (*body)(const void*) = nullptr;
    const void* arguments = nullptr;

    static void run_thread() {
        Block& block = *current;
        block.body(block.arguments);
        block.wait({Wait::kEnded});
    }
    // The running thread goes on once it is woken.
    void wait(const Wait& what) {
        thread().wait = what;
        scheduler.halt(number(running));
        fibers[running].suspend();
        thread().wait = Wait{};
    }
    void wake(int thread) { scheduler.wake(number(thread)); }
    int number(int thread) const { return place * threads + thread; }  // among those of all resident blocks
};

}  // namespace host
