// Barriers of some of a block's warps. One that is never passed is no fault: a block may end with arrivals pending.

namespace emulator {

inline void arrive(const char* name, int number, int threads, bool waits) {
    if (number < 1 || number >= kBarriers) current->fail("named barrier", "is at %s %d; numbers go from 1 to 15", name, number);
    if (threads < kLanes || threads > current->threads || threads % kLanes)
        current->fail("named barrier", "is at %s %d for %d threads, in a block of %d; whole warps take part", name, number, threads,
                      current->threads);
    current->arrive(number, threads, name, waits);
}

}  // namespace emulator

inline void bar_sync(int number, int threads) { emulator::arrive("bar_sync", number, threads, true); }

inline void bar_arrive(int number, int threads) { emulator::arrive("bar_arrive", number, threads, false); }
