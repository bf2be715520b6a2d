// The same barriers as those of named_barrier.cuh: the emulator does not ask where in the code a thread arrives.

inline void barrier_sync_unaligned(int number, int threads) { emulator::arrive("barrier_sync_unaligned", number, threads, true); }
