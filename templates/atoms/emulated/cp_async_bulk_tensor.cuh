// Tensor copies (TMA): see atoms/ptx/cp_async_bulk_tensor.cuh. By the launch's choice they take place as early as may be, when they are
// issued, or as late: loads when nobody can do anything but wait, stores when they are waited for. Until a load has been waited for at its
// mbarrier, or a store by its thread, the shadow keeps others off. Maps have four or five dimensions, boxes rows of 128 bytes and that
// swizzle.

// As build/gpu/tensor_map.py makes it.
struct alignas(64) TensorMap {
    u64 address, strides[4];  // bytes, of dimension 1 and so on
    u32 sizes[5];             // elements, innermost first
    u16 box[5];
    unsigned char rank, element_bytes, swizzle_bytes;
};

namespace emulator {

void wait_stores(int pending);

}  // namespace emulator

inline void prefetch_tensormap(const TensorMap&) {}

void cp_async_bulk_tensor_load(SharedAddress destination, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                               int batch);

void cp_async_bulk_tensor_store(const TensorMap& map, SharedAddress source, int column, int row, int head, int batch);

void cp_async_bulk_tensor_load_5d(SharedAddress destination, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                                  int end, int around);

void cp_async_bulk_tensor_store_5d(const TensorMap& map, SharedAddress source, int column, int row, int head, int end, int around);

void cp_async_bulk_commit_group();

template <int kPending>
inline void cp_async_bulk_wait_group_read() { emulator::wait_stores(kPending); }

inline void fence_proxy_async() { emulator::current->shared.fence(emulator::now()); }
