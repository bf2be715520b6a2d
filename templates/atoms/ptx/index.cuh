// Who a thread is. PTX ISA, "Special Registers": %tid, %ctaid.

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }

__device__ __forceinline__ int block_index() { return static_cast<int>(blockIdx.x); }

__device__ __forceinline__ int lane_index() { return thread_index() % 32; }

// The same for all lanes of a warp, which call this together. The shuffle tells the compiler so, which lets it keep what follows in uniform
// registers.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffff, thread_index() / 32, 0); }
