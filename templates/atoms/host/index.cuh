// Who a thread is: the fiber that runs.

inline int thread_index() { return host::current->running; }

inline int block_index() { return host::current->index; }

inline int lane_index() { return thread_index() % 32; }

// A shuffle on a GPU, so all lanes meet here.
inline int warp_index() {
    struct Nothing {
    } own;
    host::current->meet("warp_index", own, [](Nothing**) {});
    return thread_index() / 32;
}
