// Votes of a warp.

inline bool vote_sync_any(bool predicate) {
    emulator::current->meet("vote_sync_any", predicate, [](bool** lanes) {
        bool any = false;
        for (int lane = 0; lane < emulator::kLanes; ++lane) any |= *lanes[lane];
        for (int lane = 0; lane < emulator::kLanes; ++lane) *lanes[lane] = any;
    });
    return predicate;
}
