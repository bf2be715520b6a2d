// Prefetches of boxes of a tensor into the L2 (TMA). PTX ISA, "cp.async.bulk.prefetch.tensor" (sm_90).

// Asks for the box that cp_async_bulk_tensor_load would read at these coordinates; nobody waits for it. Others may write there
// meanwhile: the L2 is what all SMs read and write.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor(const TensorMap& map, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::  //
                 "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
