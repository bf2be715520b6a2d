// A load like any other, as the emulator has no L2: see atoms/ptx/cp_async_bulk_tensor_evict_first.cuh.

inline void cp_async_bulk_tensor_load_evict_first(SharedAddress destination, const TensorMap& map, SharedAddress barrier, int column,
                                                  int row, int head, int batch) {
    cp_async_bulk_tensor_load(destination, map, barrier, column, row, head, batch);
}
