// Barriers. PTX ISA, "bar, barrier" and "bar.warp.sync".

// All threads of the block arrive; what they wrote to shared memory before is visible to all of them after.
__device__ __forceinline__ void barrier_sync() { __syncthreads(); }

// The lanes of a warp arrive; what they wrote to shared memory before is visible to all of them after.
__device__ __forceinline__ void barrier_warp_sync() { __syncwarp(); }
