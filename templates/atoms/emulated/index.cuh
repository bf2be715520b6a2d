// Who a thread is: the fiber that runs.

inline int thread_index() { return emulator::current->running; }

inline int block_index() { return emulator::current->index; }

inline int lane_index() { return thread_index() % 32; }

// A shuffle on a GPU, so all lanes meet here.
inline int warp_index() {
    struct Nothing {
    } own;
    emulator::current->meet("warp_index", own, [](Nothing**) {});
    return thread_index() / 32;
}
