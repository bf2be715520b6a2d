// Reciprocals. PTX ISA, "rcp" (error at most 1 ulp; 1 / inf = +0).

__device__ __forceinline__ float rcp_approx_ftz(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
