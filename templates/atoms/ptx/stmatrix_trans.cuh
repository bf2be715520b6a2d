// Transposed stores of four 8x8 matrices of 16-bit elements from a warp's registers to shared memory. PTX ISA, "stmatrix" .trans (sm_90).
//
// Lane l gives the address of row l % 8 of matrix l / 8, 16 bytes. Its r[i] holds column l / 4, rows 2 * (l % 4) and the next, of matrix i.
__device__ __forceinline__ void stmatrix_x4_trans(SharedAddress row, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}
