// Loads of boxes whose bytes the L2 gives up before others. PTX ISA, "cp.async.bulk.tensor", "createpolicy", "Cache Eviction Priority
// Hints" (sm_90).

// As cp_async_bulk_tensor_load, of what nobody reads again soon. What others have fetched meanwhile, and was not read yet, stays.
__device__ __forceinline__ void cp_async_bulk_tensor_load_evict_first(SharedAddress destination, const TensorMap& map,
                                                                      SharedAddress barrier, int column, int row, int head, int batch) {
    asm volatile(
        "{\n"
        "    .reg .b64 policy;\n"
        "    createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "    cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint\n"
        "        [%0], [%1, {%3, %4, %5, %6}], [%2], policy;\n"
        "}" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}
