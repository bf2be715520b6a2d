// Products of a warpgroup, both operands from shared memory and not both of them K-major: see wgmma.cuh.
// PTX ISA, "wgmma.mma_async", imm-trans-a and imm-trans-b (16-bit elements alone).

// a is MN-major: the rows of d are contiguous in a row of a tile.
template <class Element, int kN>
__device__ __forceinline__ void wgmma_ss_trans_a(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate);

// b is MN-major: the columns of d are contiguous in a row of a tile.
template <class Element, int kN>
__device__ __forceinline__ void wgmma_ss_trans_b(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate);

// Both are MN-major.
template <class Element, int kN>
__device__ __forceinline__ void wgmma_ss_trans_ab(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate);
