// Asynchronous copies of boxes of a tensor between global and shared memory (TMA). PTX ISA, "cp.async.bulk.tensor", "Tensors" (sm_90).
//
// The box, its swizzle and the tensor's sizes and strides are in the map. What lies outside of the tensor is read as zeros, and
// not written. A box in shared memory begins at a multiple of 1024 bytes, and has its first coordinate contiguous.

struct alignas(64) TensorMap {
    unsigned char opaque[128];  // made by the driver: cuTensorMapEncodeTiled
};

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Reads the box at coordinates (column, row, head, batch), or (column, head, row, batch) where the map has them in this order; its bytes,
// those outside of the tensor included, count at `barrier`.
__device__ __forceinline__ void cp_async_bulk_tensor_load(SharedAddress destination, const TensorMap& map, SharedAddress barrier,
                                                          int column, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::  //
        "r"(destination), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

// Writes the box at these coordinates. None may be negative: on sm_90 a store with one is an illegal instruction, though a load reads
// zeros. Shared memory was written before a fence_proxy_async, and stays as it is until the group has read it.
__device__ __forceinline__ void cp_async_bulk_tensor_store(const TensorMap& map, SharedAddress source, int column, int row, int head,
                                                           int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::  //
                 "l"(&map), "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// The same by maps of five dimensions: the coordinates are (column, row, head, end, around), of rows of packed sequences
// (tile/common/packed_sequences.cuh).
__device__ __forceinline__ void cp_async_bulk_tensor_load_5d(SharedAddress destination, const TensorMap& map, SharedAddress barrier,
                                                             int column, int row, int head, int end, int around) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::  //
        "r"(destination), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(end), "r"(around)
        : "memory");
}
__device__ __forceinline__ void cp_async_bulk_tensor_store_5d(const TensorMap& map, SharedAddress source, int column, int row, int head,
                                                              int end, int around) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::  //
                 "l"(&map), "r"(source), "r"(column), "r"(row), "r"(head), "r"(end), "r"(around)
                 : "memory");
}

// Closes this thread's group of the stores issued since the last commit.
__device__ __forceinline__ void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but kPending of this thread's groups have read their shared memory.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Between ordinary writes to shared memory and asynchronous reads of it: by the writers, before those who read learn of it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
