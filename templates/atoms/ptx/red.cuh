// Additions of fp32 numbers to global memory that give nothing back. PTX ISA, "red"; .v4.f32: sm_90.

// The order of additions to one address is not said, and each rounds. Subnormal numbers are taken, and given, as 0.
__device__ __forceinline__ void red_add_f32(float* address, float value) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "f"(value) : "memory");
}

// The same for four neighbours, of which the first one's address is a multiple of 16.
__device__ __forceinline__ void red_add_f32_v4(float* address, const float (&value)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(__cvta_generic_to_global(address)), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3])
                 : "memory");
}
