// A block on the host: every thread is a fiber with a stack of its own, run by one thread of the operating system. A fiber runs until it
// has to wait for others; which one goes on then is the schedule's choice, so that a race that one order hides, another shows.

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

namespace host {

constexpr int kLanes = 32, kBarriers = 16;
constexpr std::size_t kStackBytes = 256 * 1024;  // of address space; what a fiber does not use costs no memory

enum class Schedule : int { kRoundRobin, kAhead, kReversed, kRandom };  // kAhead: the first warp runs as far as it may, then the next

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
};

// Why a launch was stopped: the check that failed, and a message for people.
struct Fault {
    std::atomic<bool> found{false};
    std::mutex mutex;
    std::string check, message;
};

// What all copies and waits of one thread need to remember: see atoms/host/cp_async.cuh.
struct Copy {
    std::uint32_t destination;
    const void* source;  // null: zeros
};

// A thread of the block. Its first entry needs a context with its own stack; after that a jump does, which unlike swapcontext asks nothing
// of the operating system.
struct Fiber {
    ucontext_t first;
    jmp_buf again;
    bool begun = false;
    void* stack = nullptr;
    bool done = false;
    const char* waits_at = nullptr;       // what it waits for
    int barrier = -1;                     // and which, if that is a barrier
    std::vector<std::vector<Copy>> groups;  // committed asynchronous copies, oldest first
    std::vector<Copy> open;
};

struct Warp {
    std::uint32_t runnable = 0;  // lanes
    int arrived = 0;             // at the collective `op`
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
    Options options;
    Fault* fault;
    int threads, index = 0, running = 0;  // running: the thread that runs now
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier barriers[kBarriers];
    jmp_buf scheduler;
    std::uint64_t random;
    int last_warp = 0;
    void (*body)(const void*) = nullptr;
    const void* arguments = nullptr;
    Shared shared;

    Block(const Options& options, Fault* fault, int threads, int shared_bytes)
        : options(options), fault(fault), threads(threads), fibers(threads), warps(threads / kLanes), shared(shared_bytes) {
        for (Fiber& fiber : fibers) {
            fiber.stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (fiber.stack == MAP_FAILED) std::perror("mmap of a fiber's stack"), std::abort();
        }
    }
    ~Block() {
        for (Fiber& fiber : fibers) munmap(fiber.stack, kStackBytes);
    }
    Block(const Block&) = delete;

    Fiber& fiber() { return fibers[running]; }
    Warp& warp() { return warps[running / kLanes]; }

    static void enter() {
        Block& block = *current;
        block.body(block.arguments);
        block.fiber().done = true;
        block.leave();
    }

    // Runs all threads of block `number` to their end, or until a check fails.
    void run(int number, void (*kernel)(const void*), const void* parameters) {
        current = this;
        index = number, body = kernel, arguments = parameters;
        random = (options.seed + 1) * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(number) * 0xD1B54A32D192ED03ull;
        last_warp = 0;
        shared.clear();
        for (Barrier& barrier : barriers) barrier = Barrier{};
        for (Warp& warp : warps) warp = Warp{};
        for (int thread = 0; thread < threads; ++thread) {
            Fiber& fiber = fibers[thread];
            fiber.begun = fiber.done = false, fiber.waits_at = nullptr, fiber.barrier = -1;
            fiber.groups.clear(), fiber.open.clear();
            getcontext(&fiber.first);
            fiber.first.uc_stack.ss_sp = fiber.stack, fiber.first.uc_stack.ss_size = kStackBytes;
            fiber.first.uc_link = nullptr;
            makecontext(&fiber.first, enter, 0);
            wake(thread);
        }
        for (std::size_t w = 0; w < warps.size(); ++w) warps[w].clock[w] = 1;
        while (!fault->found && pick()) resume();
        if (!fault->found)
            for (const Fiber& fiber : fibers)
                if (!fiber.done) {
                    report("deadlock", "no thread can go on: " + waiting());
                    break;
                }
        current = nullptr;
    }

    void resume() {
        Fiber& next = fiber();
        if (_setjmp(scheduler)) return;
        if (next.begun) _longjmp(next.again, 1);
        next.begun = true;
        setcontext(&next.first);
    }
    void suspend() {
        if (!_setjmp(fibers[running].again)) _longjmp(scheduler, 1);
    }

    // Back to the scheduler: the running thread goes on once it is woken.
    void leave() {
        const int self = running;
        warps[self / kLanes].runnable &= ~(1u << self % kLanes);
        suspend();
    }
    void wait_at(const char* what, int barrier = -1) {
        fiber().waits_at = what, fiber().barrier = barrier;
        leave();
    }
    void wake(int thread) {
        fibers[thread].waits_at = nullptr, fibers[thread].barrier = -1;
        warps[thread / kLanes].runnable |= 1u << thread % kLanes;
    }

    // Chooses the thread that runs next; false if none can.
    bool pick() {
        const int count = static_cast<int>(warps.size());
        int chosen = -1;
        switch (static_cast<Schedule>(options.schedule)) {
            case Schedule::kRoundRobin:
                for (int i = 1; i <= count && chosen < 0; ++i)
                    if (warps[(last_warp + i) % count].runnable) chosen = (last_warp + i) % count;
                break;
            case Schedule::kAhead:
                for (int i = 0; i < count && chosen < 0; ++i)
                    if (warps[i].runnable) chosen = i;
                break;
            case Schedule::kReversed:
                for (int i = count - 1; i >= 0 && chosen < 0; --i)
                    if (warps[i].runnable) chosen = i;
                break;
            case Schedule::kRandom: {
                int able = 0;
                for (const Warp& warp : warps) able += warp.runnable != 0;
                if (!able) break;
                int skip = static_cast<int>(draw() % able);
                for (int i = 0; chosen < 0; ++i)
                    if (warps[i].runnable && skip-- == 0) chosen = i;
            }
        }
        if (chosen < 0) return false;
        last_warp = chosen;
        const std::uint32_t lanes = warps[chosen].runnable;
        int lane = __builtin_ctz(lanes);
        if (static_cast<Schedule>(options.schedule) == Schedule::kReversed) lane = 31 - __builtin_clz(lanes);
        if (static_cast<Schedule>(options.schedule) == Schedule::kRandom) {
            int skip = static_cast<int>(draw() % __builtin_popcount(lanes));
            for (lane = 0;; ++lane)
                if ((lanes >> lane & 1) && skip-- == 0) break;
        }
        running = chosen * kLanes + lane;
        return true;
    }
    std::uint64_t draw() {  // Steele, Lea and Flood 2014: SplitMix64
        std::uint64_t z = random += 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        return z ^ z >> 31;
    }

    // All lanes of the warp meet at `op`. The last one to come does the work for all of them.
    template <class Operand, class Work>
    void meet(const char* op, Operand& own, const Work& work) {
        Warp& warp = this->warp();
        if (warp.arrived && std::strcmp(warp.op, op))
            fail("divergence", "is at %s while another lane of its warp is at %s", op, warp.op);
        warp.op = op;
        warp.operands[running % kLanes] = &own;
        if (++warp.arrived < kLanes) return wait_at(op);
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
        if (++barrier.arrived < expected) return wait_at(what, number);
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

    // Stops the launch. Does not return.
    [[gnu::format(printf, 3, 4)]] void fail(const char* check, const char* format, ...) {
        char text[1600];
        va_list values;
        va_start(values, format);
        std::vsnprintf(text, sizeof text, format, values);
        va_end(values);
        report(check, "thread " + std::to_string(running) + " (warp " + std::to_string(running / kLanes) + ", lane " +
                          std::to_string(running % kLanes) + ") " + text);
        suspend();
        std::abort();  // a launch that failed goes on nowhere
    }
    void report(const char* check, const std::string& text) {
        const std::lock_guard<std::mutex> guard(fault->mutex);
        if (fault->found) return;
        fault->check = check;
        fault->message = "block " + std::to_string(index) + ": " + text;
        fault->found = true;
    }

    // "threads 0-31 have ended; threads 32-127 wait at barrier_sync 0"
    std::string waiting() const {
        std::string text;
        for (int thread = 0; thread < threads;) {
            const Fiber& fiber = fibers[thread];
            int end = thread + 1;
            while (end < threads && fibers[end].done == fiber.done && fibers[end].waits_at == fiber.waits_at && fibers[end].barrier == fiber.barrier)
                ++end;
            text += (text.empty() ? "threads " : "; threads ") + std::to_string(thread) + "-" + std::to_string(end - 1);
            text += fiber.done ? " have ended" : std::string(" wait at ") + (fiber.waits_at ? fiber.waits_at : "nothing");
            if (fiber.barrier >= 0) text += " " + std::to_string(fiber.barrier);
            thread = end;
        }
        return text;
    }
};

}  // namespace host
