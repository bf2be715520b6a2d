// Warp-wide loads of four 8x8 matrices of 16-bit elements. PTX ISA, "ldmatrix" (sm_75).
//
// Lane 8*i + r gives the address of row r (16 bytes) of matrix i; fragment[i] is the caller's part of matrix i:
//   ldmatrix_x4        lane l holds row l/4, columns 2*(l%4) and 2*(l%4)+1
//   ldmatrix_x4_trans  lane l holds column l/4, rows 2*(l%4) and 2*(l%4)+1

__device__ __forceinline__ void ldmatrix_x4(u32 (&fragment)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(row)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&fragment)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(row)
                 : "memory");
}
