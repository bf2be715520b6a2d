// Barriers: fibers wait until all have come.

inline void barrier_sync() { emulator::current->arrive(0, emulator::current->threads, "barrier_sync", true); }

inline void barrier_warp_sync() {
    int nothing = 0;
    emulator::current->meet("barrier_warp_sync", nothing, [](int**) { ++emulator::current->warp().synced; });
}
