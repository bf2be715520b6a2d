// What stands behind the atoms of mbarriers (atoms/emulated/mbarrier.cuh).

#include <deque>

namespace emulator {

struct Mbarrier {
    Block& block;
    SharedAddress address;
    int party;
    u32 expected, missing;       // arrivals: of each phase, and what this one lacks
    i64 bytes = 0;               // announced, and not landed yet
    Clock phase = 0;             // how many are complete
    bool cluster_scope = false;  // other blocks have released something here
    // By this phase's arrivals; by those of complete phases.
    Clocks collected{block.progress.launch.cluster}, published{block.progress.launch.cluster};

    void settle() {
        if (missing || bytes) return;
        missing = expected;
        published.join(collected);
        published.of(block.rank)[party] = ++phase;
        block.scheduler.stir();
    }
    // So many bytes have landed. Nobody may be running: it reports, and does not fail. Those of a copy that was issued in this block were
    // announced before, those from another one are before the phase is complete.
    void bring(u32 landed, bool announced) {
        bytes -= landed;
        if (bytes < 0 && (announced || !missing)) report_unannounced();
        settle();
    }
    void report_unannounced() {
        block.fault.report("mbarrier", "block " + std::to_string(block.index) + ": copies brought the mbarrier at " +
                                           std::to_string(address) + " " + std::to_string(-bytes) + " bytes that nobody announced");
    }
};

struct Mbarriers : Kept {
    std::deque<Mbarrier> all;  // which stay where they are: copies under way point at theirs
};

Mbarrier& mbarrier_at(SharedAddress address, bool by_copies, Block& block = *current) {
    require(block.shared.may_use_mbarrier(address, current->now_in(block), by_copies), address, 8, block);
    for (Mbarrier& barrier : block.kept<Mbarriers>().all)
        if (barrier.address == address) return barrier;
    current->fail("mbarrier", "uses bytes at %s, within an mbarrier", named(address, block).c_str());
    std::abort();
}

void arrive(Mbarrier& barrier, u32 bytes, bool releases = true) {
    if (!barrier.missing)
        current->fail("mbarrier", "arrives at %s, in whose phase all %u have arrived already",
                      named(barrier.address, barrier.block).c_str(), barrier.expected);
    if (releases) current->release(barrier.collected);
    --barrier.missing, barrier.bytes += bytes;
    if (!barrier.missing && barrier.bytes < 0) barrier.report_unannounced();
    barrier.settle();
}

// `cluster`: what other blocks have released is acquired, too.
bool try_wait(const char* name, SharedAddress address, u32 parity, bool cluster) {
    const Mbarrier& awaited = mbarrier_at(address, false);
    if (parity > 1) current->fail("mbarrier", "waits at %u for parity %u", address, parity);
    if (awaited.phase % 2 == parity) {
        const u64 bytes = static_cast<u64>(awaited.bytes);
        const Wait polled{Wait::kOnPhase, name, address, parity, awaited.missing, bytes};
        if (!current->spins(polled) || awaited.phase % 2 == parity) return false;
    }
    if (awaited.cluster_scope && !cluster)
        current->fail("mbarrier", "is at %s of %u, which acquires nothing from the other blocks that release there", name, address);
    current->acquire(awaited.published);
    tell(name, nullptr, address);
    return true;
}

}  // namespace emulator

void mbarrier_init(SharedAddress barrier, u32 arrivals) {
    emulator::require(emulator::current->shared.may_write(barrier, 8, emulator::now(), false), barrier, 8);
    emulator::current->shared.mark_mbarrier(barrier);
    std::deque<emulator::Mbarrier>& all = emulator::current->kept<emulator::Mbarriers>().all;
    if (!arrivals) emulator::current->fail("mbarrier", "initialises %u for no arrivals", barrier);
    if (all.size() == emulator::kMaxMbarriers) emulator::current->fail("mbarrier", "initialises more than %d", emulator::kMaxMbarriers);
    all.push_back({*emulator::current, barrier, emulator::kMbarriers + static_cast<int>(all.size()), arrivals, arrivals});
}

void mbarrier_arrive(SharedAddress barrier) {
    emulator::tell("mbarrier_arrive", nullptr, barrier);
    emulator::arrive(emulator::mbarrier_at(barrier, false), 0);
}

void mbarrier_arrive_expect_tx(SharedAddress barrier, u32 bytes) { emulator::arrive(emulator::mbarrier_at(barrier, false), bytes); }
