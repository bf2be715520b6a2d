// Barriers in shared memory that count arrivals and bytes: see atoms/ptx/mbarrier.cuh. Their state lies beside shared memory, in which no
// ordinary access may touch their bytes. An arrival releases what its warp has done; a wait that succeeds acquires what all arrivals of
// the phases before have released, and the copies that landed in them.

namespace emulator {

// `cluster`: what other blocks have released is acquired, too.
bool try_wait(const char* name, SharedAddress address, u32 parity, bool cluster);

}  // namespace emulator

void mbarrier_init(SharedAddress barrier, u32 arrivals);

inline void fence_mbarrier_init() { emulator::current->shared.fence(emulator::now()); }

void mbarrier_arrive(SharedAddress barrier);

void mbarrier_arrive_expect_tx(SharedAddress barrier, u32 bytes);

inline bool mbarrier_try_wait_parity(SharedAddress barrier, u32 parity) {
    return emulator::try_wait("mbarrier_try_wait_parity", barrier, parity, false);
}
