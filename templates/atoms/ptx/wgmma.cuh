// Asynchronous matrix products of a warpgroup, d (+)= a * b: 64x16 times 16xkN, fp32 accumulation. PTX ISA, "wgmma" (sm_90a).
//
// Warp w of the four holds rows 16w to 16w+15 of d and of a. Lane l holds, of d, for the column tile of 8 columns from 8j:
//   d[j][0], d[j][1]: row l / 4, columns 2 (l % 4) and the next;  d[j][2], d[j][3]: row l / 4 + 8, the same columns.
// Of a in registers, two column tiles of 8 as two elements a register:
//   a[0], a[1]: rows l / 4 and l / 4 + 8 of the first one;  a[2], a[3]: of the second one.
// So two neighbouring tiles of d, rounded, make an a.
// Registers must not be touched between a product and the wait for it.

// Where a matrix lies in shared memory, in tiles with 128-byte swizzle. PTX ISA, "Matrix Descriptor Format": bits 0 to 13 the address, 16
// to 29 the leading and 32 to 45 the stride byte offset, all in units of 16 bytes; bits 62 and 63 the swizzle (1: 128 bytes).
//   K-major (the contraction dimension is contiguous): rows of 128 bytes; groups of 8 rows are 1024 bytes apart (stride offset); the
//   leading offset is ignored.
//   MN-major (the other dimension is contiguous): groups of 8 rows of the contraction are 1024 bytes apart (stride offset); panels of 64
//   columns are `panel_bytes` apart (leading offset).
// Upper word: 1 << 30 (swizzle) and 1024 / 16 = 0x40 (stride). The matrix begins `offset` bytes after `address`: shared memory ends below
// 2^18, so (address + offset) / 16 < 2^14 never carries, and a constant offset is one addition of 32 bits. `panel_bytes` is for MN-major
// alone: its default is ignored.
__device__ __forceinline__ u64 matrix_descriptor(SharedAddress address, u32 offset, u32 panel_bytes = 16) {
    return u64{0x40000040u} << 32 | ((panel_bytes >> 4 << 16 | address >> 4) + (offset >> 4));
}

// Both from shared memory, K-major. `accumulate` 0: d is only written.
template <class Element, int kN>
__device__ __forceinline__ void wgmma_ss(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate);

// a from registers; b from shared memory, MN-major.
template <class Element, int kN>
__device__ __forceinline__ void wgmma_rs(float (&d)[kN / 8][4], const u32 (&a)[4], u64 b, int accumulate);

// Comes before the first product, and wherever ordinary instructions have written registers that the next product uses.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of products issued since the last commit.
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the kPending latest groups are complete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
