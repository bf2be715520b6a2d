// Warp-wide matrix product d += a * b, 16x16 times 16x8, fp32 accumulation. PTX ISA, "mma.sync" m16n8k16 (sm_80).
//
// With g = lane / 4 and t = lane % 4, each register of a and b holds two neighbours, the lower index in the low half:
//   a[0] row g   columns 2t, 2t+1     a[1] row g+8 columns 2t, 2t+1
//   a[2] row g   columns 2t+8, 2t+9   a[3] row g+8 columns 2t+8, 2t+9
//   b0   rows 2t, 2t+1 column g       b1   rows 2t+8, 2t+9 column g
//   d[0], d[1] row g   columns 2t, 2t+1     d[2], d[3] row g+8 columns 2t, 2t+1

template <class Element>
__device__ __forceinline__ void mma_sync_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <>
__device__ __forceinline__ void mma_sync_m16n8k16<Bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_sync_m16n8k16<Fp16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
