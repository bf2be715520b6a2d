// Exchange of registers between the lanes of a warp. PTX ISA, "shfl.sync".

// The value of lane (own lane xor `lane_mask`). All 32 lanes take part.
__device__ __forceinline__ float shfl_sync_bfly(float value, int lane_mask) {
    return __shfl_xor_sync(0xffffffff, value, lane_mask);
}
__device__ __forceinline__ u32 shfl_sync_bfly(u32 value, int lane_mask) { return __shfl_xor_sync(0xffffffff, value, lane_mask); }

// The value of lane 0, which the compiler then knows to be the same in all lanes. All 32 lanes take part.
__device__ __forceinline__ int shfl_sync_first(int value) { return __shfl_sync(0xffffffff, value, 0); }

// The value of that lane, the same one in all lanes. All 32 lanes take part.
__device__ __forceinline__ float shfl_sync_idx(float value, int lane) { return __shfl_sync(0xffffffff, value, lane); }
