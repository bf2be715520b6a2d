// Asynchronous copies from global to shared memory. PTX ISA, "cp.async" and its completion by groups (sm_80).

// Copies 16 bytes past L1; where `valid` is false it reads nothing and writes 16 zero bytes.
__device__ __forceinline__ void cp_async_16(SharedAddress destination, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(destination), "l"(__cvta_generic_to_global(source)), "r"(valid ? 16 : 0)
                 : "memory");
}

// Copies 16 bytes past L1.
__device__ __forceinline__ void cp_async_16(SharedAddress destination, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(__cvta_generic_to_global(source)) : "memory");
}

// Copies 4 bytes.
__device__ __forceinline__ void cp_async_4(SharedAddress destination, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(__cvta_generic_to_global(source)) : "memory");
}

// Closes this thread's group of the copies issued since the last commit. A group may be empty.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's most recent groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
