// Reads of two neighbouring fp32 values in shared memory. PTX ISA, "ld" (.v2).

__device__ __forceinline__ void load_shared_pair(float& first, float& second, SharedAddress address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address) : "memory");
}
