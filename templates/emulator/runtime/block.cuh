// What the threads of a block wait for, and how they go on: see emulator/block.cuh.

#include <algorithm>
#include <cstdarg>

namespace emulator {

Block::Block(const Options& options, const Progress& progress, Fault& fault, Scheduler& scheduler, Cluster& cluster, int slot)
    : options(options), progress(progress), fault(fault), scheduler(scheduler), cluster(cluster), slot(slot),
      rank(slot % progress.launch.cluster), threads(progress.launch.threads), shared(progress.launch.shared_bytes), stacks(threads),
      fibers(threads), barriers(kBarriers, Barrier{0, 0, {}, Clocks(progress.launch.cluster)}) {}

Block::~Block() {
    if (current == this) current = nullptr;
}

void Block::begin(int number, void (*kernel)(const void*)) {
    index = number, body = kernel, ended = 0, has_waited = false;
    shared.clear();
    for (Barrier& barrier : barriers) clear(barrier);
    states.assign(threads, Thread{});
    warps.assign(threads / kLanes, Warp{{}, Clocks(progress.launch.cluster)});
    warpgroups.assign(threads / kWarpgroup, Meeting{});
    kept_by_type.clear();
    for (std::size_t w = 0; w < warps.size(); ++w) clock(w)[w] = 1;
    for (int i = 0; i < threads; ++i) {
        fibers[i].begin(stacks.of(i), run_thread);
        wake(i);
    }
}

void Block::resume(int thread) {
    current = this, running = thread;
    fibers[thread].resume();
}

bool Block::done() const {
    for (const Thread& thread : states)
        if (thread.wait.kind != Wait::kEnded) return false;
    return true;
}

void Block::require_global(std::uint64_t address, std::uint64_t bytes, bool writes, const char* does) {
    for (int i = 0; i < options.extent_count; ++i)
        if ((options.extents[i].writable || !writes) && options.extents[i].holds(address, bytes)) return;
    if (options.extent_count)
        fail("global memory", "%s %d bytes %soutside of the tensors: %s", does, static_cast<int>(bytes), writes ? "" : "from ",
             place_among(options.extents, options.extent_count, address).c_str());
}

void Block::claim_region(std::uint32_t address, int bytes) {
    const int number = thread().regions++;
    const bool is_new = number == shared.regions();
    if (is_new && (number == kMaxRegions || shared.claimed + bytes > shared.given)) fail_claim(shared.claimed + bytes, number + 1);
    if (!shared.claim(number, address, bytes))
        fail("divergence", "takes a region of %d bytes at %u, and another thread a different one", bytes, address);
}

void Block::release(Clocks& clocks) {
    clocks.join(warp().seen);
    ++clock(running / kLanes)[running / kLanes];
}

void Block::acquire(const Clocks& clocks) { warp().seen.join(clocks); }

void Block::arrive(int number, int expected, const char* what, bool waits) {
    Barrier& barrier = barriers[number];
    if (barrier.arrived && barrier.expected != expected)
        fail("divergence", "says that barrier %d has %d threads, and another said %d", number, expected, barrier.expected);
    barrier.expected = expected;
    tell(what);
    release(barrier.seen);
    if (waits) barrier.waiting.push_back(running);
    if (++barrier.arrived < expected) {
        if (waits) wait({Wait::kAtBarrier, what, static_cast<std::uint64_t>(number)});
        return;
    }
    for (int thread : barrier.waiting) {
        Warp& warp = warps[thread / kLanes];
        warp.seen.join(barrier.seen);
        if (thread % kLanes == 0) ++warp.synced;
        if (thread != running) wake(thread);
    }
    clear(barrier);
}

void Block::wait(const Wait& what) {
    thread().wait = what;
    scheduler.halt(number(running));
    fibers[running].suspend();
    thread().wait = Wait{};
}

void Block::wake(int thread) { scheduler.wake(number(thread)); }

void Block::wait_for_launch(const char* what) {
    has_waited = true;
    if (!progress.alone()) wait({Wait::kForLaunch, what});
}

bool Block::waits_for_launch() const {
    return std::any_of(states.begin(), states.end(), [](const Thread& thread) { return thread.wait.kind == Wait::kForLaunch; });
}

void Block::launch_has_ended() {
    for (int i = 0; i < threads; ++i)
        if (states[i].wait.kind == Wait::kForLaunch) wake(i);
}

bool Block::spins(const Wait& polled) {
    const bool same = polled == thread().polled;
    thread().polled = polled;
    if (!same) return false;
    thread().wait = polled;
    scheduler.set_aside(number(running));
    fibers[running].suspend();
    thread().wait = Wait{};
    return true;
}

bool Block::spins(const char* what, const void* address, std::uint64_t value) {
    return spins({Wait::kOnMemory, what, bits_as<std::uintptr_t>(address), value});
}

void Block::fail(const char* check, const char* format, ...) {
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

std::string Block::waiting() const {
    std::string text = "block " + std::to_string(index) + ": ";
    for (int first = 0; first < threads;) {
        int end = first + 1;
        while (end < threads && states[end].wait == states[first].wait) ++end;
        text += (first ? "; threads " : "threads ") + std::to_string(first) + "-" + std::to_string(end - 1) + " ";
        text += states[first].wait.text();
        first = end;
    }
    return text;
}

void Block::run_thread() {
    Block& block = *current;
    block.body(block.progress.launch.parameters);
    const int regions = block.shared.regions();
    if (++block.ended == block.threads && regions && block.shared.claimed != block.shared.given)
        block.fail_claim(block.shared.claimed, regions);
    if (block.ended == block.threads && block.progress.before && !block.has_waited)
        block.fail("overlap", "ends the block, which has not waited for the launch that this one overlaps");
    for (const auto& [type, kept] : block.kept_by_type) kept->thread_ends(block);
    block.cluster.thread_leaves(block);  // its last thread may be the last of all
    block.wait({Wait::kEnded});
}

void Block::fail_claim(int bytes, int regions) {
    fail("shared memory claim", "takes %d bytes of shared memory in %d regions; the launch gives the block %d", bytes, regions,
         shared.given);
}

bool Block::last_to_meet(Meeting& meeting, int count, const char* op, void* own) {
    if (meeting.arrived && std::strcmp(meeting.op, op))
        fail("divergence", "is at %s while another thread of its %s is at %s", op, count == kLanes ? "warp" : "warpgroup", meeting.op);
    meeting.op = op;
    meeting.operands[running % count] = own;
    if (++meeting.arrived < count) {
        wait({Wait::kForLanes, op});
        return false;
    }
    meeting.arrived = 0;
    tell(op);
    return true;
}

void Block::wake_others(int count) {
    const int first = running / count * count;
    for (int i = 0; i < count; ++i)
        if (first + i != running) wake(first + i);
}

void Block::clear(Barrier& barrier) {
    barrier.arrived = 0;
    barrier.waiting.clear(), barrier.seen.clear();
}

}  // namespace emulator
