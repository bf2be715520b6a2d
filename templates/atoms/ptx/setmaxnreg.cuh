// Registers of a warpgroup. PTX ISA, "setmaxnreg" (sm_90a). All its warps take part; kRegisters is a multiple of 8 from 24 to 256.

// Gives registers back.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Takes more; waits until other warpgroups have given back enough.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
