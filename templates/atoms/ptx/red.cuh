// Additions of fp32 numbers to global memory that return nothing. PTX ISA, "red"; .v4.f32: sm_90. Additions to one address have no fixed
// order, and each rounds. Subnormal numbers count as 0.

__device__ __forceinline__ void red_add_f32(float* address, float value) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "f"(value) : "memory");
}

// Adds four neighbouring numbers; `address` is a multiple of 16.
__device__ __forceinline__ void red_add_f32_v4(float* address, const float (&value)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(__cvta_generic_to_global(address)), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3])
                 : "memory");
}
