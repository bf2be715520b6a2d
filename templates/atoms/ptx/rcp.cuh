// Reciprocals. PTX ISA, "rcp" (.approx: error of 1 ulp; rcp(0) = inf).

__device__ __forceinline__ float rcp_approx_ftz(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
