// One lane for all. PTX ISA, "elect.sync" (sm_90).

// Whether this lane is the elected one, the same each time. All 32 lanes take part. Unlike a comparison, it keeps no register.
__device__ __forceinline__ bool elect_sync() {
    u32 elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected != 0;
}
