// Votes of a warp.

inline bool vote_sync_any(bool predicate) {
    emulator::current->meet("vote_sync_any", predicate, [](bool** lanes) {
        bool any = false;
        for (int lane = 0; lane < emulator::kLanes; ++lane) any |= *lanes[lane];
        for (int lane = 0; lane < emulator::kLanes; ++lane) *lanes[lane] = any;
    });
    return predicate;
}

namespace emulator {

struct Ballot {
    bool own;
    u32 all;
};

}  // namespace emulator

inline u32 vote_sync_ballot(bool predicate) {
    emulator::Ballot ballot{predicate, 0};
    emulator::current->meet("vote_sync_ballot", ballot, [](emulator::Ballot** lanes) {
        u32 all = 0;
        for (int lane = 0; lane < emulator::kLanes; ++lane) all |= static_cast<u32>(lanes[lane]->own) << lane;
        for (int lane = 0; lane < emulator::kLanes; ++lane) lanes[lane]->all = all;
    });
    return ballot.all;
}
