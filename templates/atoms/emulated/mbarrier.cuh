// Barriers in shared memory that count arrivals and bytes: see atoms/ptx/mbarrier.cuh. Their state lies beside shared memory, in which no
// ordinary access may touch their bytes. An arrival releases what its warp has done; a wait that succeeds acquires what all arrivals of
// the phases before have released, and the copies that landed in them.

namespace emulator {

struct Mbarrier {
    SharedAddress address;
    int party;
    u32 expected, missing;  // arrivals: of each phase, and what this one lacks
    i64 bytes = 0;          // announced, and not landed yet
    Clock phase = 0;        // how many are complete
    Clock collected[kParties] = {}, published[kParties] = {};  // by this phase's arrivals; by those of complete phases

    void settle() {
        if (missing || bytes) return;
        missing = expected;
        join(published, collected);
        published[party] = ++phase;
        current->scheduler.stir();
    }
};

struct Mbarriers : Kept {
    std::deque<Mbarrier> all;  // which stay where they are: copies under way point at theirs
};

inline Mbarrier& mbarrier_at(SharedAddress address, bool by_copies) {
    require(current->shared.may_use_mbarrier(address, now(), by_copies), address, 8);
    for (Mbarrier& barrier : current->kept<Mbarriers>().all)
        if (barrier.address == address) return barrier;
    current->fail("mbarrier", "uses bytes at %u, within an mbarrier", address);
    std::abort();
}

inline void arrive(SharedAddress address, u32 bytes) {
    Mbarrier& barrier = mbarrier_at(address, false);
    if (!barrier.missing) current->fail("mbarrier", "arrives at %u, in whose phase all %u have arrived already", address, barrier.expected);
    current->release(barrier.collected);
    --barrier.missing, barrier.bytes += bytes;
    barrier.settle();
}

}  // namespace emulator

inline void mbarrier_init(SharedAddress barrier, u32 arrivals) {
    emulator::require(emulator::current->shared.may_write(barrier, 8, emulator::now(), false), barrier, 8);
    emulator::current->shared.mark_mbarrier(barrier);
    std::deque<emulator::Mbarrier>& all = emulator::current->kept<emulator::Mbarriers>().all;
    if (!arrivals) emulator::current->fail("mbarrier", "initialises %u for no arrivals", barrier);
    if (all.size() == emulator::kMaxMbarriers) emulator::current->fail("mbarrier", "initialises more than %d", emulator::kMaxMbarriers);
    all.push_back({barrier, emulator::kMbarriers + static_cast<int>(all.size()), arrivals, arrivals});
}

inline void fence_mbarrier_init() { emulator::current->shared.fence(emulator::now()); }

inline void mbarrier_arrive(SharedAddress barrier) { emulator::arrive(barrier, 0); }

inline void mbarrier_arrive_expect_tx(SharedAddress barrier, u32 bytes) { emulator::arrive(barrier, bytes); }

inline bool mbarrier_try_wait_parity(SharedAddress barrier, u32 parity) {
    const emulator::Mbarrier& awaited = emulator::mbarrier_at(barrier, false);
    if (parity > 1) emulator::current->fail("mbarrier", "waits at %u for parity %u", barrier, parity);
    if (awaited.phase % 2 == parity) {
        const u64 bytes = static_cast<u64>(awaited.bytes);
        const emulator::Wait polled{emulator::Wait::kOnPhase, "mbarrier_try_wait_parity", barrier, parity, awaited.missing, bytes};
        if (!emulator::current->spins(polled) || awaited.phase % 2 == parity) return false;
    }
    emulator::current->acquire(awaited.published);
    return true;
}
