// Barriers: fibers wait until all have come.

inline void barrier_sync() { host::current->arrive(0, host::current->threads, "barrier_sync", true); }

inline void barrier_warp_sync() {
    int nothing = 0;
    host::current->meet("barrier_warp_sync", nothing, [](int**) { ++host::current->warp().synced; });
}
