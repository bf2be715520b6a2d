// Who a thread is: the fiber that runs.

inline int thread_index() { return host::current->running; }

inline int block_index() { return host::current->index; }

inline int lane_index() { return thread_index() % 32; }

inline int warp_index() { return thread_index() / 32; }
