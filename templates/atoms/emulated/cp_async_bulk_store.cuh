// Bulk stores: see atoms/ptx/cp_async_bulk_store.cuh. They take place early or late, as stores of boxes do (cp_async_bulk_tensor.cuh).

namespace emulator {
void wait_stores(int pending);
}

void cp_async_bulk_store(void* destination, SharedAddress source, u32 bytes);

// A group that has been read is in global memory here, too: that another thread learns of it too early is found, by a thread that waits for
// no group at all.
template <int kPending>
inline void cp_async_bulk_wait_group() { emulator::wait_stores(kPending); }
