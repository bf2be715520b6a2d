// One lane for all: see atoms/ptx/elect_sync.cuh. PTX leaves open which one; here it is the first.

inline bool elect_sync() {
    bool elected = false;
    emulator::current->meet("elect_sync", elected, [](bool** lanes) { *lanes[0] = true; });
    return elected;
}
