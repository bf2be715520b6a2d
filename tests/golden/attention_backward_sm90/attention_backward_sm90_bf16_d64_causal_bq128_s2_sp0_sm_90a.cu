// attention_backward_sm90_bf16_d64_causal_bq128_s2_sp0_sm_90a
//
// Attention backward for Hopper by recomputation (Dao 2023, algorithm 2), with the products of FlashAttention-3 (Shah et al. 2024):
//   P = exp(scale * Q K^T + causal mask - lse),  dV = P^T dO,
//   dP = dO V^T,  dS = P * (dP - delta),  dQ = scale * dS K,  dK = scale * dS^T Q.
// A block owns 128 keys of a key/value head, and walks over the queries that see them, of all query heads that share it.
// One thread of the first warpgroup, the producer, loads tiles. Two warpgroups, the consumers, own 64 keys each, whose dK and dV stay
// in registers. dQ is added up in memory.
//
//   problem     backward_bf16_d64_causal
//   config      block_q 128, stages 2, split false
//   target      sm_90a
//   _preprocess  <<<ceil(len_q / 128) * heads_q * batch, 128>>>
//   launch       <<<ceil(len_kv / 128) * heads_kv * batch, 384, 165984 bytes>>>
//   _postprocess <<<ceil(len_q / 128) * heads_q * batch, 256, 16384 bytes>>>
//   parts    atoms/ptx: types, register, index, shared_memory, shared_pair, barrier, named_barrier, mbarrier,
//              cp_async_bulk_tensor, cp_async_bulk, setmaxnreg, wgmma, wgmma_transposed, stmatrix, stmatrix_trans, red,
//              cvt, cvt_f32, ex2, mul, shfl_sync, vote_sync, mma_sync, griddepcontrol
//            tile/common: shared_regions, tile_scheduler, sequences, score_chain, softmax_rows, lse, row_statistics,
//              key_work
//            tile/warp: exact_rows, score_gradients
//            tile/warpgroup: pipeline, panel_tile, gemm, transposed_operand, query_gradient, backward_beside,
//              backward_inputs, store_columns, narrow_consumer

// ==== atoms/ptx/types.cuh ============================================================================================

// Fixed-width integers and element types. NVRTC brings no headers, so neither <cstdint> nor <cuda_bf16.h> is there.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct Bf16 { u16 bits; };
struct Fp16 { u16 bits; };

// A function: NVRTC has no constant expression for infinity without headers.
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// ==== atoms/ptx/register.cuh =========================================================================================

// Hints to the compiler about registers: no instructions.

// Launders a value: the compiler can no longer trace it to its origin, nor hoist above this point what is computed from it.
template <class T>
__device__ __forceinline__ void launder(T*& pointer) {
    asm volatile("" : "+l"(pointer));
}
__device__ __forceinline__ void launder(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void launder(u32& value) { asm volatile("" : "+r"(value)); }

// Launders a fragment, as CUTLASS's warpgroup_fence_operand: the compiler moves no access to its registers across this point.
template <int kTiles>
__device__ __forceinline__ void launder(float (&fragment)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(fragment[i][j])::"memory");
}
template <int kTiles>
__device__ __forceinline__ void launder(u32 (&fragment)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(fragment[i][j])::"memory");
}

// ==== atoms/ptx/index.cuh ============================================================================================

// Who a thread is. PTX ISA, "Special Registers": %tid, %ctaid.

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }

__device__ __forceinline__ int block_index() { return static_cast<int>(blockIdx.x); }

__device__ __forceinline__ int lane_index() { return thread_index() % 32; }

// The same for all lanes of a warp, which call this together. The shuffle tells the compiler so, which lets it keep what follows in uniform
// registers.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffff, thread_index() / 32, 0); }

// ==== atoms/ptx/shared_memory.cuh ====================================================================================

// Shared memory: where it begins, and ordinary reads and writes of it. PTX ISA, "ld", "st", "cvta".

using SharedAddress = u32;  // byte address in the shared window

// The block's dynamic shared memory, aligned to 1024 bytes. The only shared variable of a kernel.
__device__ __forceinline__ SharedAddress shared_memory() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return static_cast<SharedAddress>(__cvta_generic_to_shared(memory));
}

// Hooks of the emulator that runs these kernels on a CPU: bytes after each region that nobody may touch. On a GPU they do nothing.
constexpr u32 kRedZone = 0;
__device__ __forceinline__ void claim_region(SharedAddress, int) {}

__device__ __forceinline__ u32 load_shared(SharedAddress address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// ==== atoms/ptx/shared_pair.cuh ======================================================================================

// Reads of two neighbouring fp32 values in shared memory. PTX ISA, "ld" (.v2).

__device__ __forceinline__ void load_shared_pair(float& first, float& second, SharedAddress address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address) : "memory");
}

// ==== atoms/ptx/barrier.cuh ==========================================================================================

// Barriers. PTX ISA, "bar, barrier" and "bar.warp.sync".

// All threads of the block arrive; what they wrote to shared memory before is visible to all of them after.
__device__ __forceinline__ void barrier_sync() { __syncthreads(); }

// The lanes of a warp arrive; what they wrote to shared memory before is visible to all of them after.
__device__ __forceinline__ void barrier_warp_sync() { __syncwarp(); }

// ==== atoms/ptx/named_barrier.cuh ====================================================================================

// Barriers of some of a block's warps, by number: 1 to 15. PTX ISA, "bar, barrier". Number 0 is barrier_sync's.

// Waits until `threads` threads of bar_sync and bar_arrive together have arrived. Whole warps call it.
__device__ __forceinline__ void bar_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ==== atoms/ptx/mbarrier.cuh =========================================================================================

// Barriers in shared memory that count arrivals and bytes of asynchronous copies. PTX ISA, "mbarrier" (sm_90). 8 bytes each.
//
// A phase is complete once all arrivals and all announced bytes have come; then the next one begins. Phases are told apart by their
// parity: the first one has parity 0, and waiting for parity 1 at the very beginning returns at once.

// Sets a barrier up for phases of `arrivals`. One thread does it; see fence_mbarrier_init.
__device__ __forceinline__ void mbarrier_init(SharedAddress barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Between the initialisation of barriers and a barrier_sync: makes them known to asynchronous copies.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// One arrival; what this thread wrote before is visible to those that wait.
__device__ __forceinline__ void mbarrier_arrive(SharedAddress barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival that announces `bytes` of asynchronous copies, which must land as well.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(SharedAddress barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity is complete. May block for a while before it says no.
__device__ __forceinline__ bool mbarrier_try_wait_parity(SharedAddress barrier, u32 parity) {
    u32 complete;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(complete)
        : "r"(barrier), "r"(parity)
        : "memory");
    return complete != 0;
}

// ==== atoms/ptx/cp_async_bulk_tensor.cuh =============================================================================

// Asynchronous copies of boxes of a tensor between global and shared memory (TMA). PTX ISA, "cp.async.bulk.tensor", "Tensors" (sm_90).
//
// The box, its swizzle and the tensor's sizes and strides are in the map. What lies outside of the tensor is read as zeros, and
// not written. A box in shared memory begins at a multiple of 1024 bytes, and has its first coordinate contiguous.

struct alignas(64) TensorMap {
    unsigned char opaque[128];  // made by the driver: cuTensorMapEncodeTiled
};

// Reads the box at coordinates (column, row, head, batch), or (column, head, row, batch) where the map has them in this order; its bytes,
// those outside of the tensor included, count at `barrier`.
__device__ __forceinline__ void cp_async_bulk_tensor_load(SharedAddress destination, const TensorMap& map, SharedAddress barrier,
                                                          int column, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::  //
        "r"(destination), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

// Writes the box at these coordinates. None may be negative: on sm_90 a store with one is an illegal instruction, though a load reads
// zeros. Shared memory was written before a fence_proxy_async, and stays as it is until the group has read it.
__device__ __forceinline__ void cp_async_bulk_tensor_store(const TensorMap& map, SharedAddress source, int column, int row, int head,
                                                           int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::  //
                 "l"(&map), "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// Closes this thread's group of the stores issued since the last commit.
__device__ __forceinline__ void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but kPending of this thread's groups have read their shared memory.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Between ordinary writes to shared memory and asynchronous reads of it: by the writers, before those who read learn of it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ==== atoms/ptx/cp_async_bulk.cuh ====================================================================================

// Asynchronous copies of contiguous bytes from global to shared memory. PTX ISA, "cp.async.bulk" (sm_90).

// Reads `bytes` bytes, which count at `barrier`. Both addresses and the size are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_load(SharedAddress destination, const void* source, u32 bytes, SharedAddress barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
                 "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
                 : "memory");
}

// ==== atoms/ptx/setmaxnreg.cuh =======================================================================================

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

// ==== atoms/ptx/wgmma.cuh ============================================================================================

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

// ==== atoms/ptx/wgmma_transposed.cuh =================================================================================

// Products of a warpgroup, both operands from shared memory and not both of them K-major: see wgmma.cuh.
// PTX ISA, "wgmma.mma_async", imm-trans-a and imm-trans-b (16-bit elements alone).

// a is MN-major: the rows of d are contiguous in a row of a tile.
template <class Element, int kN>
__device__ __forceinline__ void wgmma_ss_trans_a(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate);

// b is MN-major: the columns of d are contiguous in a row of a tile.
template <class Element, int kN>
__device__ __forceinline__ void wgmma_ss_trans_b(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate);

// ==== atoms/ptx/stmatrix.cuh =========================================================================================

// Stores four 8x8 matrices of 16-bit elements from a warp's registers to shared memory. PTX ISA, "stmatrix" (sm_90).
//
// Lane l gives the address of row l % 8 of matrix l / 8, 16 bytes. Its r[i] holds row l / 4, columns 2 * (l % 4) and the next, of matrix i.
__device__ __forceinline__ void stmatrix_x4(SharedAddress row, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// ==== atoms/ptx/stmatrix_trans.cuh ===================================================================================

// Transposed stores of four 8x8 matrices of 16-bit elements from a warp's registers to shared memory. PTX ISA, "stmatrix" .trans (sm_90).
//
// Lane l gives the address of row l % 8 of matrix l / 8, 16 bytes. Its r[i] holds column l / 4, rows 2 * (l % 4) and the next, of matrix i.
__device__ __forceinline__ void stmatrix_x4_trans(SharedAddress row, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// ==== atoms/ptx/red.cuh ==============================================================================================

// Additions of fp32 numbers to global memory that return nothing. PTX ISA, "red"; .v4.f32: sm_90. Additions to one address have no fixed
// order, and each rounds. Subnormal numbers count as 0.

// Adds four neighbouring numbers; `address` is a multiple of 16.
__device__ __forceinline__ void red_add_f32_v4(float* address, const float (&value)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(__cvta_generic_to_global(address)), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3])
                 : "memory");
}

// ==== atoms/ptx/cvt.cuh ==============================================================================================

// Conversion of two fp32 values to a pair of 16-bit elements, to nearest even. PTX ISA, "cvt" (.bf16x2: sm_80).

// `low` goes to the low half of the result.
template <class Element>
__device__ __forceinline__ u32 cvt_rn_x2(float low, float high);

template <>
__device__ __forceinline__ u32 cvt_rn_x2<Bf16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

template <>
__device__ __forceinline__ u32 cvt_rn_x2<Fp16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// ==== atoms/ptx/cvt_f32.cuh ==========================================================================================

// Conversion of a pair of 16-bit elements to two fp32 values, which is exact. PTX ISA, "cvt".

// `low` comes from the low half of the pair.
template <class Element>
__device__ __forceinline__ void cvt_f32_x2(float& low, float& high, u32 pair);

template <>
__device__ __forceinline__ void cvt_f32_x2<Bf16>(float& low, float& high, u32 pair) {  // bf16 is the upper half of fp32
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
}

template <>
__device__ __forceinline__ void cvt_f32_x2<Fp16>(float& low, float& high, u32 pair) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}" : "=f"(low), "=f"(high) : "r"(pair));
}

// ==== atoms/ptx/ex2.cuh ==============================================================================================

// Powers of 2. PTX ISA, "ex2" (error below 2 ulp; ex2(-inf) = +0).

__device__ __forceinline__ float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ==== atoms/ptx/mul.cuh ==============================================================================================

// Products. PTX ISA, "mul".

// Rounded by itself: never fused with the addition that follows.
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }

// The upper 64 of the product's 128 bits.
__device__ __forceinline__ u64 mul_hi(u64 a, u64 b) { return __umul64hi(a, b); }

// ==== atoms/ptx/shfl_sync.cuh ========================================================================================

// Exchange of registers between the lanes of a warp. PTX ISA, "shfl.sync".

// The value of lane (own lane xor `lane_mask`). All 32 lanes take part.
__device__ __forceinline__ float shfl_sync_bfly(float value, int lane_mask) {
    return __shfl_xor_sync(0xffffffff, value, lane_mask);
}
__device__ __forceinline__ u32 shfl_sync_bfly(u32 value, int lane_mask) { return __shfl_xor_sync(0xffffffff, value, lane_mask); }

// ==== atoms/ptx/vote_sync.cuh ========================================================================================

// Votes of a warp. PTX ISA, "vote.sync".

// Whether `predicate` holds for any of the 32 lanes. All take part.
__device__ __forceinline__ bool vote_sync_any(bool predicate) { return __any_sync(0xffffffff, predicate); }

// ==== atoms/ptx/mma_sync.cuh =========================================================================================

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

// ==== atoms/ptx/griddepcontrol.cuh ===================================================================================

// Launches that overlap: one that depends on the launch before it may begin while that is under way. PTX ISA, "griddepcontrol" (sm_90).

// The launch that depends on this one may begin once all blocks have called this or ended. It says nothing of what they have written.
__device__ __forceinline__ void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Returns once the launch before has ended, and all that it wrote is there; at once where the two do not overlap.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- shapes of instructions that these kernels use ------------------------------------------------------------------

template <>
__device__ __forceinline__ void wgmma_ss<Bf16, 128>(float (&d)[16][4], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;\n"  // p: accumulate; then scale a, scale b, transpose a, transpose b
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "l"(a), "l"(b), "r"(accumulate));
}

template <>
__device__ __forceinline__ void wgmma_rs<Bf16, 64>(float (&d)[8][4], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n"  // p: accumulate; then scale a, scale b, transpose b
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

template <>
__device__ __forceinline__ void wgmma_ss_trans_b<Bf16, 64>(float (&d)[8][4], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 1;\n"  // p: accumulate; then scale a, scale b, transpose a, transpose b
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "l"(a), "l"(b), "r"(accumulate));
}

using Element = Bf16;

// ---- what these kernels are specialised for ---------------------------------------------------------------------------

constexpr int kHeadDim = 64, kHeadDimV = 64;
constexpr int kBlockQ = 128, kBlockKv = 128, kWarpgroups = 2, kThreads = (kWarpgroups + 1) * 128;
constexpr int kStages = 2;
constexpr bool kCausal = true;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr int kColumns = (kHeadDim + 15) / 16 * 16, kColumnsV = (kHeadDimV + 15) / 16 * 16;  // as the matrix products take them

// Strides in elements. lse and d_lse are [batch, heads_q, len_q], dense; d_lse may be null.
struct RowParameters {
    const Element* q;
    const Element* k;
    const Element* v;
    const Element* out;
    const Element* d_out;
    const float* lse;
    const float* d_lse;
    float* row_lse;
    float* row_delta;
    float* row_shift;
    float* d_q_sum;
    i64 q_batch;
    i64 q_head;
    i64 q_row;
    i64 k_batch;
    i64 k_head;
    i64 k_row;
    i64 v_batch;
    i64 v_head;
    i64 v_row;
    i64 out_batch;
    i64 out_head;
    i64 out_row;
    i64 d_out_batch;
    i64 d_out_head;
    i64 d_out_row;
    u64 query_tiles_reciprocal;
    u64 heads_q_reciprocal;
    u64 group_reciprocal;
    int heads_q;
    int len_q;
    int len_kv;
    int query_tiles;
    float scale_log2;
};
struct Parameters {
    TensorMap q_map;
    TensorMap k_map;
    TensorMap v_map;
    TensorMap d_out_map;
    TensorMap d_k_map;
    TensorMap d_v_map;
    const float* row_lse;
    const float* row_delta;
    const float* row_shift;
    float* d_q_sum;
    u64 heads_kv_reciprocal;
    u64 l2_group_heads_reciprocal;
    u64 l2_group_tiles_reciprocal;
    int heads_q;
    int len_q;
    int len_kv;
    int query_tiles;
    int heads_kv;
    int group;
    int key_tiles;
    int l2_group_heads;
    int l2_group_tiles;
    float scale_log2;
    float scale;
};
struct SumParameters {
    TensorMap d_q_map;
    float* d_q_sum;
    u64 query_tiles_reciprocal;
    u64 heads_q_reciprocal;
    int heads_q;
    int len_q;
    int len_kv;
    int query_tiles;
    float scale;
};
// ---- tile operations --------------------------------------------------------------------------------------------------

// ==== tile/common/shared_regions.cuh =================================================================================

// How a kernel divides its shared memory: regions one after the other. Together they take just what the launch gives the block.

struct SharedRegions {
    SharedAddress next;

    __device__ __forceinline__ SharedRegions() : next(shared_memory()) {}

    // The address of a new region. Regions that need an alignment come before those whose `bytes` are no multiple of it.
    __device__ __forceinline__ SharedAddress take(int bytes) {
        const SharedAddress region = next;
        next += bytes + kRedZone;
        claim_region(region, bytes);
        return region;
    }
};

// ==== tile/common/tile_scheduler.cuh =================================================================================

// The tile scheduler: from a block's index, or that of a claimed tile, to its work tile.

// n / divisor, for n >= 0, given `reciprocal` = ceil(2^64 / divisor), or 0 for a divisor of 1 (Lemire, Kaser and Kurz 2019: exact for 32
// bits).
__device__ __forceinline__ int divide(int n, u64 reciprocal) { return reciprocal == 0 ? n : static_cast<int>(mul_hi(n, reciprocal)); }

struct WorkTile {
    int tile;   // number among the head's query tiles, of which the last one is handed out first
    int head;   // number of the head, or under PackGQA of the set of heads that share tiles
    int batch;
};

// L2 swizzle by groups of heads: what all tiles of a group read fits into the L2 together (K and V; in the backward pass Q, dO and the sums
// of dQ), and one group comes after the other. Within a group the longest work tiles come first (LPT scheduling): under a causal mask the
// last query tiles, or in the backward pass the first key tiles. In a group of one head the tiles of the head follow each
// other.
struct TileScheduler {
    int head_tiles;      // tiles of each head
    int l2_group_heads;  // heads of an L2 group
    int l2_group_tiles;  // work tiles of an L2 group
    u64 l2_group_heads_reciprocal, l2_group_tiles_reciprocal;

    template <class Parameters>
    __device__ __forceinline__ static TileScheduler of(const Parameters& p, int head_tiles) {
        return {head_tiles, p.l2_group_heads, p.l2_group_tiles, p.l2_group_heads_reciprocal, p.l2_group_tiles_reciprocal};
    }
};

// The work tile of number `index`; the last tiles of heads come first. `heads`: heads of a batch entry, or its sets of heads that share
// tiles. heads * batch is a multiple of l2_group_heads.
__device__ __forceinline__ WorkTile find_work_tile(int index, const TileScheduler& scheduler, int heads, u64 heads_reciprocal) {
    const int l2_group = divide(index, scheduler.l2_group_tiles_reciprocal), within = index - l2_group * scheduler.l2_group_tiles;
    const int tile = divide(within, scheduler.l2_group_heads_reciprocal);
    const int head_and_batch = l2_group * scheduler.l2_group_heads + within - tile * scheduler.l2_group_heads;
    const int batch = divide(head_and_batch, heads_reciprocal);
    return {scheduler.head_tiles - 1 - tile, head_and_batch - batch * heads, batch};
}

// ==== tile/common/sequences.cuh ======================================================================================

// Where the sequences of a batch lie. Kernels get all lengths and row addresses from one struct, so that another layout of sequences needs
// only another struct with these functions. Tensor maps know nothing of it: they assume the dense layout.

// Distances between batch entries, heads and rows of a tensor, in elements.
struct Strides {
    i64 batch, head, row;
};

// Sequences of one length, each an entry of the tensors' batch axis.
struct DenseSequences {
    int query_length, key_length;  // of each sequence
    int heads_q, query_tiles;

    __device__ __forceinline__ int len_q(int) const { return query_length; }
    __device__ __forceinline__ int len_kv(int) const { return key_length; }

    // Row `row` of a head in a tensor of queries, and in a tensor of keys: for kernels that read rows by their addresses.
    template <class Element>
    __device__ __forceinline__ Element* query_row(Element* tensor, const Strides& strides, int batch, int head, int row) const {
        return tensor + batch * strides.batch + head * strides.head + row * strides.row;
    }
    template <class Element>
    __device__ __forceinline__ Element* key_row(Element* tensor, const Strides& strides, int batch, int head, int row) const {
        return tensor + batch * strides.batch + head * strides.head + row * strides.row;
    }
    // Where a head's first query lies in lse and all that has its layout: [batch, heads_q, len_q], dense.
    __device__ __forceinline__ i64 lse_offset(int batch, int head) const {
        return (static_cast<i64>(batch) * heads_q + head) * query_length;
    }
    // The first query tile's place in [batch, heads_q, query_tiles], for the backward pass.
    __device__ __forceinline__ i64 first_tile(int batch, int head) const {
        return (static_cast<i64>(batch) * heads_q + head) * query_tiles;
    }
};

// ==== tile/common/score_chain.cuh ====================================================================================

// The mask: which keys a query sees. It is a chain of conditions, its links, and a query sees the keys that all of them let it see. Each
// link is a struct with the functions of `SequenceEnd`; one that hides nothing compiles to nothing.

// For the backward pass, which visits query tiles: queries outside of [begin, end) see no key of a key tile; those in
// [full_begin, full_end) see all of its keys.
struct QueryRange {
    int begin, full_begin, full_end, end;
};

// A query sees the keys [begin, end). Neither end may go down from one query to the next: so the first and the last query of a tile say
// what all of them see. Here and above 0x7fffffff stands for no limit.
struct KeyRange {
    int begin, end;
};

// There are keys up to len_kv only. Query rows past len_q need no mask: the forward pass stores nothing of them, and in the backward pass
// their row_lse is +inf, so that their P is 0.
struct SequenceEnd {
    static constexpr bool kHidesFirstKeys = false;  // whether keys() may begin at other than 0
    int len_q, len_kv;

    // Whether a query sees a key.
    __device__ __forceinline__ bool visible(int, int key) const { return key < len_kv; }
    // All keys that a query sees. The only one of the three that the forward pass calls.
    __device__ __forceinline__ KeyRange keys(int) const { return {0, len_kv}; }
    // The queries that see any of the keys [first_key, end_key), and those that see all of them.
    __device__ __forceinline__ QueryRange queries(int first_key, int end_key) const {
        return {0, end_key <= len_kv ? 0 : len_q, len_q, first_key < len_kv ? len_q : 0};
    }
};

struct NoMask {
    static constexpr bool kHidesFirstKeys = false;

    __device__ __forceinline__ bool visible(int, int) const { return true; }
    __device__ __forceinline__ KeyRange keys(int) const { return {0, 0x7fffffff}; }
    __device__ __forceinline__ QueryRange queries(int, int) const { return {0, 0, 0x7fffffff, 0x7fffffff}; }
};

// Query i sees the keys j <= i + causal_offset. Aligned bottom-right, causal_offset = len_kv - len_q.
struct Causal {
    static constexpr bool kHidesFirstKeys = false;
    int causal_offset;

    __device__ __forceinline__ bool visible(int query, int key) const { return key <= query + causal_offset; }
    __device__ __forceinline__ KeyRange keys(int query) const { return {0, query + causal_offset + 1}; }
    __device__ __forceinline__ QueryRange queries(int first_key, int end_key) const {
        return {max(0, first_key - causal_offset), max(0, end_key - 1 - causal_offset), 0x7fffffff, 0x7fffffff};
    }
};

// For the backward pass: query tiles [begin, end) see keys of a key tile; those outside [full_begin, full_end) need the mask.
struct QueryTileRange {
    int begin, full_begin, full_end, end;

    __device__ __forceinline__ int count() const { return max(0, end - begin); }
    __device__ __forceinline__ bool needs_mask(int tile) const { return tile < full_begin || tile >= full_end; }
};

// Some query of a tile sees keys of the key tiles [begin, end); those outside [full_begin, full_end) need the mask. kHidesFirstKeys: begin
// and full_begin may be other than 0.
template <bool kHidesFirstKeys>
struct KeyTileRange {
    int begin, full_begin, full_end, end;

    __device__ __forceinline__ int last() const { return end > begin ? end - 1 : -1; }  // the first one visited; -1: there is none
    __device__ __forceinline__ bool needs_mask(int tile) const { return tile >= full_end || (kHidesFirstKeys && tile < full_begin); }
};

template <class... Links>
struct ScoreChain : Links... {
    static constexpr bool kHidesFirstKeys = (Links::kHidesFirstKeys || ...);  // else the range of every query's keys begins at 0

    __device__ __forceinline__ bool visible(int query, int key) const { return (Links::visible(query, key) && ...); }
    __device__ __forceinline__ KeyRange keys(int query) const {
        KeyRange all{0, 0x7fffffff};
        (intersect(all, Links::keys(query)), ...);
        return all;
    }

    // For the kBlockQ queries from `first_query` on. Kernels visit key tiles from the last to the first. A tile that needs the mask also
    // makes softmax update its row max, which it must where a query's last key is visited, as the first of its keys. So where queries
    // differ in their last key, the tile of the first query's last key counts as one that needs the mask even if it is seen whole: hence
    // the - 1.
    template <int kBlockQ, int kBlockKv>
    __device__ __forceinline__ KeyTileRange<kHidesFirstKeys> key_tiles(int first_query) const {
        const KeyRange of_first = keys(first_query), of_last = keys(first_query + kBlockQ - 1);
        const int first_end = max(0, of_first.end), last_end = max(0, of_last.end);  // a range may end before the first key
        return {of_first.begin / kBlockKv, (of_last.begin + kBlockKv - 1) / kBlockKv, (first_end - (first_end < last_end)) / kBlockKv,
                (last_end + kBlockKv - 1) / kBlockKv};
    }

    // A last tile that reaches past len_q counts as full, too.
    template <int kBlockQ>
    __device__ __forceinline__ QueryTileRange query_tiles(int first_key, int end_key, int len_q) const {
        QueryRange all{0, 0, len_q, len_q};
        (intersect(all, Links::queries(first_key, end_key)), ...);
        return {all.begin / kBlockQ, (all.full_begin + kBlockQ - 1) / kBlockQ, all.full_end == len_q ? 0x7fffffff : all.full_end / kBlockQ,
                (all.end + kBlockQ - 1) / kBlockQ};
    }

  private:
    __device__ __forceinline__ static void intersect(KeyRange& all, const KeyRange& link) {
        all = {max(all.begin, link.begin), min(all.end, link.end)};
    }
    __device__ __forceinline__ static void intersect(QueryRange& all, const QueryRange& link) {
        all = {max(all.begin, link.begin), max(all.full_begin, link.full_begin), min(all.full_end, link.full_end), min(all.end, link.end)};
    }
};

// The chain of a plain problem: keys up to len_kv, and a causal mask, aligned bottom-right, if kCausal.
template <bool kCausal>
__device__ __forceinline__ auto make_chain(int len_q, int len_kv) {
    if constexpr (kCausal)
        return ScoreChain<SequenceEnd, Causal>{{len_q, len_kv}, {len_kv - len_q}};
    else
        return ScoreChain<SequenceEnd, NoMask>{{len_q, len_kv}, {}};
}

// ==== tile/common/softmax_rows.cuh ===================================================================================

// What kernels share of softmax's rows: their origin, and in online softmax the running row max, and reductions over the quad of lanes that
// holds a row of S.

// One fused multiply-add computes an exponent, S * scale_log2 - row_max, where row_max is maximum * scale_log2, rounded. A large row_max
// has a large rounding error: from 2^31 on it can reach half an ulp = 2^7, and 2^(2^7) overflows fp32. So a huge row first subtracts the
// maximum itself, without the scale: its exponent is (S - shift) * scale_log2, with row_max = 0. All other rows have shift = 0.
struct Origin {
    float shift, row_max;
};

// A row is huge if the absolute value of its maximum * scale_log2 is at least this. Below it, rounding the maximum changes an exponent by
// at most 2^-12 and P by at most 1.7e-4 of it, less than half an fp16 ulp just below 1 (2^-12): so the P of the maximum is still 1.
constexpr float kHuge = 0x1p13f;

// Tells the compiler that a condition hardly ever holds, so that it keeps the code that depends on it out of the way of the rest.
__device__ __forceinline__ bool unlikely(bool condition) { return __builtin_expect(condition, false); }

// The factor that normalises a row of O: 1 / total, to 1 ulp, or 0 if no key is seen. `total` is 0, NaN or from about 1 to below 2^100.
// Newton's method refines a guess good to 5 %, three times: a division would bring a branch, and rcp.approx differs between GPUs.
__device__ __forceinline__ float normaliser(float total) {
    float y = __int_as_float(0x7ef311c3 - __float_as_int(total));  // negates the exponent: 254 << 23, less what makes the error least
#pragma unroll
    for (int i = 0; i < 3; ++i) y = fmaf(y, fmaf(-total, y, 1.0f), y);
    return total == 0.0f ? 0.0f : y;
}

// ==== tile/common/lse.cuh ============================================================================================

// The log-sum-exp of a row, from its row max and row sum.

// Mean relative error of ex2.approx, whose results are too small (measured on sm_90 for arguments from -16 to -1, assumed everywhere). lse
// is corrected twice: the factor that rescales a row sum is raised by it, and log_sum_exp raises the sum's terms. O is not: the error of P
// cancels in O / row_sum, and 5e-8 a rescale does not show in 16 bits.
constexpr float kEx2Bias = 5.0e-8f;

// Natural logarithm of 1 + x as x + x^2 q(x), to 1.2 ulp, for x from sqrt(1/2) - 1 to sqrt(2) - 1. q is the polynomial with q(0) = -1/2
// that makes the largest relative error least.
__device__ __forceinline__ float log_near_one(float x) {
    constexpr float kQ[] = {0x1.645dd8p-4f, -0x1.24326cp-3f, 0x1.31745ap-3f,  -0x1.538254p-3f,
                            0x1.98d7f4p-3f, -0x1.000382p-2f, 0x1.5556d8p-2f, -0.5f};
    float q = kQ[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) q = fmaf(q, x, kQ[i]);
    return fmaf(mul_rn(q, x), x, x);
}

// The factor from a row max to the units of softmax_scale * S, in two floats: row_max * (high + low). Usually row_max is in base 2, and the
// factor is ln2_hi + ln2_lo; in a huge row it is a score without the scale, and the factor is the softmax scale.
struct RowMaxFactor {
    float high, low;

    // For a row max that is a score itself, without the scale: the softmax scale, scale_log2 * (ln2_hi + ln2_lo).
    __device__ __forceinline__ static RowMaxFactor of_score(float scale_log2, float ln2_hi, float ln2_lo) {
        const float high = mul_rn(scale_log2, ln2_hi);
        return {high, fmaf(scale_log2, ln2_hi, -high) + scale_log2 * ln2_lo};
    }
};

// log(total) + row_max * (factor.high + factor.low), to about one rounding. fp32 takes some care for that: each term is split into a main
// part and a small correction, and the sum is rounded once. `total` is finite and > 0, or NaN; for 0 the result means nothing.
__device__ __forceinline__ float log_sum_exp(float row_max, float total, const RowMaxFactor& factor) {
    constexpr float kLn2 = 0.693147182f, kLn2Low = -1.90465430e-9f;
    // total = fraction * 2^exponent, with a fraction from sqrt(1/2) to sqrt(2).
    const int power = (__float_as_int(total) - __float_as_int(0.70710678f)) >> 23;
    const float exponent = static_cast<float>(power), fraction = __int_as_float(__float_as_int(total) - power * 0x800000);
    const float inverse = (2.0f - fraction) * __int_as_float((127 - power) * 0x800000);  // of total, to 20 %, and exactly 1 for 1
    const float a = mul_rn(row_max, factor.high), b = mul_rn(exponent, kLn2);
    const float s = a + b, b_in_s = s - a;
    const float sum_error = (a - (s - b_in_s)) + (b - b_in_s);  // exactly (Knuth's TwoSum)
    const float product_error = fmaf(row_max, factor.high, -a) + fmaf(exponent, kLn2, -b);
    const float low_parts = row_max * factor.low + exponent * kLn2Low;
    // The term of the score that set row_max, 1 / total of the sum, is 2^0 or nearly so, and has no error.
    const float bias = kEx2Bias * (1.0f - inverse);
    const float corrections = sum_error + product_error + low_parts + bias;
    // 0 * total carries on a NaN, which the arithmetic on total's bits has lost.
    return s + (log_near_one(fraction - 1.0f) + fmaf(0.0f, total, corrections));
}

// The log-sum-exp of a row of softmax_scale * S. ln2_hi + ln2_lo is scale / scale_log2, about ln 2. A row that saw no key gets -inf.
__device__ __forceinline__ float log_sum_exp(const Origin& origin, float total, float scale_log2, float ln2_hi, float ln2_lo) {
    const bool huge = origin.shift != 0.0f;
    const RowMaxFactor factor = huge ? RowMaxFactor::of_score(scale_log2, ln2_hi, ln2_lo) : RowMaxFactor{ln2_hi, ln2_lo};
    const float value = log_sum_exp(huge ? origin.shift : origin.row_max, total, factor);
    return total == 0.0f ? -infinity() : value;
}

// ==== tile/common/row_statistics.cuh =================================================================================

// What the backward pass needs of each query row and is computed once before it: row_lse, the log-sum-exp in base 2, and row_delta,
// rowsum(dO * O) - d_lse. Both are padded to whole query tiles; in the padding P and dS are 0.

constexpr int kRowLanes = 8;  // neighbouring lanes that share a row

// What a lane has of a row of O and of the same row of dO.
template <int kHeadDimV>
struct RowPart {
    static constexpr int kChunks = (kHeadDimV + kRowLanes * 8 - 1) / (kRowLanes * 8);  // of 16 bytes
    uint4 out[kChunks], d_out[kChunks];

    template <class Element>
    __device__ __forceinline__ void load(const Element* out_row, const Element* d_out_row) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int column = (i * kRowLanes + lane_index() % kRowLanes) * 8;
            const bool exists = kHeadDimV % (kRowLanes * 8) == 0 || column < kHeadDimV;
            out[i] = exists ? *reinterpret_cast<const uint4*>(out_row + column) : uint4{0, 0, 0, 0};
            d_out[i] = exists ? *reinterpret_cast<const uint4*>(d_out_row + column) : uint4{0, 0, 0, 0};
        }
    }
    // rowsum(dO * O) in fp32, in all lanes of the row.
    template <class Element>
    __device__ __forceinline__ float product() const {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const u32 pairs[2][4] = {{out[i].x, out[i].y, out[i].z, out[i].w}, {d_out[i].x, d_out[i].y, d_out[i].z, d_out[i].w}};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float x[2], y[2];
                cvt_f32_x2<Element>(x[0], x[1], pairs[0][j]);
                cvt_f32_x2<Element>(y[0], y[1], pairs[1][j]);
                dot = fmaf(x[1], y[1], fmaf(x[0], y[0], dot));
            }
        }
#pragma unroll
        for (int distance = 1; distance < kRowLanes; distance *= 2) dot += shfl_sync_bfly(dot, distance);
        return dot;
    }
};

// exp2(S * scale_log2 - row_lse) is P. A row that sees no key gets +inf, with which P is 0 without a mask.
__device__ __forceinline__ float base2_lse(float lse) { return lse == -infinity() ? infinity() : lse * 1.44269504f; }

// Writes kRows of row_lse and row_delta. The first `rows_valid` of them exist, none if it is <= 0; the rest are padding. All pointers are
// to the first row; d_lse may be null.
template <int kThreads, int kRows, int kHeadDimV, class Element>
__device__ __forceinline__ void write_row_statistics(float* row_lse, float* row_delta, const Element* out, i64 out_stride,
                                                     const Element* d_out, i64 d_out_stride, const float* lse, const float* d_lse,
                                                     int rows_valid) {
    constexpr int kRowsOfPass = kThreads / kRowLanes, kPasses = kRows / kRowsOfPass, kChunks = RowPart<kHeadDimV>::kChunks;
    constexpr int kAtOnce = kChunks > 4 ? 1 : 4 / kChunks;  // passes whose loads do not wait for one another
    static_assert(kRows % kRowsOfPass == 0, "each pass has rows for all threads");
#pragma unroll
    for (int first = 0; first < kPasses; first += kAtOnce) {
        RowPart<kHeadDimV> parts[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce && first + i < kPasses; ++i) {
            const i64 row = min((first + i) * kRowsOfPass + thread_index() / kRowLanes, rows_valid - 1);
            if (rows_valid > 0) parts[i].load(out + row * out_stride, d_out + row * d_out_stride);
            else parts[i] = {};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce && first + i < kPasses; ++i) {
            const int row = (first + i) * kRowsOfPass + thread_index() / kRowLanes;
            const bool exists = row < rows_valid;
            const float product = parts[i].template product<Element>();
            if (lane_index() % kRowLanes != 0) continue;
            row_lse[row] = exists ? base2_lse(lse[row]) : infinity();
            row_delta[row] = exists ? product - (d_lse == nullptr ? 0.0f : d_lse[row]) : 0.0f;
        }
    }
}

// Sets kCount fp32 numbers to 0.
template <int kThreads, int kCount>
__device__ __forceinline__ void write_zeros(float* first) {
    static_assert(kCount % 4 == 0, "16 bytes at a time");
#pragma unroll 8
    for (int i = thread_index() * 4; i < kCount; i += kThreads * 4) *reinterpret_cast<uint4*>(first + i) = uint4{0, 0, 0, 0};
}

// ==== tile/warp/exact_rows.cuh =======================================================================================

// Rows of which the forward pass has not saved enough, so that the first kernel goes through their keys once more:
// - Huge rows, whose log-sum-exp is so large that fp32 has lost what P = exp2(S * scale_log2 - row_lse) needs: see `Origin` in
//   softmax_rows.cuh. Their P is exp2((S - row_shift) * scale_log2 - row_lse), with the row's maximum as the shift.
// - All rows of sequences with few keys. Where one key has nearly all of a row's probability, dP - delta should nearly vanish; but
//   rowsum(dO * O), in row_delta, comes from the rounded O, so that dS keeps the rounding error of O. Plain PyTorch sums up P * dP, where
//   errors vanish with dS. Among many keys the gradients of other rows are so much larger that this does not show. A query that sees one
//   key has exactly no gradient.
// This is made to be short, not fast.

constexpr int kFewKeys = 64;

// By its lse, since the forward pass has not saved the maximum, from which lse differs by log(len_kv) at most. NaN and +inf count as huge.
__device__ __forceinline__ bool is_huge_lse(float lse) { return !(fabsf(lse) * 1.44269504f < kHuge) && lse != -infinity(); }

// Whether any of kRows rows is huge, of which `rows_valid` exist. All lanes of a warp ask together.
template <int kRows>
__device__ __forceinline__ bool any_huge_row(const float* lse, int rows_valid) {
    bool huge = false;
#pragma unroll
    for (int row = lane_index(); row < kRows; row += 32) huge |= row < rows_valid && is_huge_lse(lse[row]);
    return vote_sync_any(huge);
}

// A row's maximum over some of its keys, and with E = exp2((S - maximum) * scale_log2) the sums of E and of E * dP.
struct RowSum {
    float maximum, row_sum, d_p;

    __device__ __forceinline__ void add(const RowSum& other, float scale_log2) {
        const float higher = fmaxf(maximum, other.maximum);
        auto factor = [&](float x) {  // -inf - (-inf) would be NaN
            return x == higher ? 1.0f : ex2_approx_ftz((x - higher) * scale_log2);
        };
        const float own = factor(maximum), others = factor(other.maximum);
        *this = {higher, row_sum * own + other.row_sum * others, d_p * own + other.d_p * others};
    }
};

// The first of some rows of a tensor, and how many there are.
template <class Element>
struct Rows {
    const Element* first;
    i64 stride;
    int count;

    // Past the end, the last one: nobody uses what comes of it.
    __device__ __forceinline__ const Element* row(int i) const { return first + min(i, count - 1) * stride; }
};
template <class Element>
Rows(const Element*, i64, int) -> Rows<Element>;

// 32 columns of a row as two matrix products take them, zeros past its end: words[i] is of columns i * 8 + lane % 4 * 2 and the next one.
// A lane loads what is contiguous, and four lanes exchange it.
template <int kWidth, class Element>
__device__ __forceinline__ void load_operand(u32 (&words)[4], const Element* row, int first_column) {
    const int column = first_column + lane_index() % 4 * 8;
    const uint4 v = column < kWidth ? *reinterpret_cast<const uint4*>(row + column) : uint4{0, 0, 0, 0};
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool upper = lane_index() & distance;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & distance) continue;
            u32 &low = words[i], &high = words[i + distance];
            const u32 other = shfl_sync_bfly(upper ? low : high, distance);
            (upper ? low : high) = other;
        }
    }
}

// The product of 16 keys' rows and 8 queries' rows. It takes columns in the order of the main kernel's products, so that both
// round it alike as far as mma.sync and wgmma do.
template <int kWidth, class Element>
__device__ __forceinline__ void multiply_rows(float (&product)[4], const Rows<Element>& keys, int first_key, const Rows<Element>& queries,
                                              int first_query) {
    const int own_row = lane_index() / 4;
    const Element *low_key = keys.row(first_key + own_row), *high_key = keys.row(first_key + own_row + 8);
    const Element* query = queries.row(first_query + own_row);
#pragma unroll
    for (int e = 0; e < 4; ++e) product[e] = 0.0f;
    int column = 0;
    launder(column);  // narrow rows have a loop, too: without one the assembler mixes two products, and has not registers enough
#pragma unroll 1
    for (; column < kWidth; column += 32) {
        u32 low[4], high[4], b[4];
        load_operand<kWidth>(low, low_key, column);
        load_operand<kWidth>(high, high_key, column);
        load_operand<kWidth>(b, query, column);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const u32 a[4] = {low[i], high[i], low[i + 1], high[i + 1]};
            mma_sync_m16n8k16<Element>(product, a, b[i], b[i + 1]);
        }
    }
}

// What a walk over keys reads: of the queries of a tile, and of all keys that they may see.
template <class Element>
struct WalkedRows {
    Rows<Element> q, d_out, k, v;
};
template <class Element>
WalkedRows(Rows<Element>, Rows<Element>, Rows<Element>, Rows<Element>) -> WalkedRows<Element>;

// The sums of 8 rows of a tile from `first` on, of which this lane has first + lane % 4 * 2 and the next one.
template <int kHeadDim, int kHeadDimV, class Chain, class Element>
__device__ __forceinline__ void sum_rows(RowSum (&sums)[2], const WalkedRows<Element>& rows, int first, int first_query, float scale_log2,
                                         const Chain& chain) {
    const int query = first_query + first + lane_index() % 4 * 2;
    sums[0] = sums[1] = {-infinity(), 0.0f, 0.0f};
#pragma unroll 1
    for (int first_key = 0; first_key < rows.k.count; first_key += 16) {
        float s[4], d_p[4];
        multiply_rows<kHeadDim>(s, rows.k, first_key, rows.q, first);
        multiply_rows<kHeadDimV>(d_p, rows.v, first_key, rows.d_out, first);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (chain.visible(query + e % 2, first_key + lane_index() / 4 + e / 2 * 8)) sums[e % 2].add({s[e], 1.0f, d_p[e]}, scale_log2);
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const RowSum& own = sums[e];
            const float maximum = shfl_sync_bfly(own.maximum, distance), row_sum = shfl_sync_bfly(own.row_sum, distance);
            const RowSum other{maximum, row_sum, shfl_sync_bfly(own.d_p, distance)};
            sums[e].add(other, scale_log2);
        }
}

// Writes row_lse of a tile's huge rows, row_shift, which is 0 for the others, and row_delta of all rows. The pointers are to the first row
// of the tile, which is `first_query` of a head. `huge`: whether it has huge rows.
template <int kThreads, int kRows, int kHeadDim, int kHeadDimV, class Sequences, class Chain, class Parameters>
__device__ __forceinline__ void write_exact_rows(float* row_lse, float* row_delta, float* row_shift, const Parameters& p,
                                                 const Sequences& sequences, int batch, int head, int first_query, bool huge,
                                                 const Chain& chain) {
    const Strides of_q{p.q_batch, p.q_head, p.q_row}, of_d_out{p.d_out_batch, p.d_out_head, p.d_out_row};
    const Strides of_k{p.k_batch, p.k_head, p.k_row}, of_v{p.v_batch, p.v_head, p.v_row};
    const int head_kv = divide(head, p.group_reciprocal), queries = sequences.len_q(batch) - first_query, keys = sequences.len_kv(batch);
    const WalkedRows rows{Rows{sequences.query_row(p.q, of_q, batch, head, first_query), p.q_row, queries},
                          Rows{sequences.query_row(p.d_out, of_d_out, batch, head, first_query), p.d_out_row, queries},
                          Rows{sequences.key_row(p.k, of_k, batch, head_kv, 0), p.k_row, keys},
                          Rows{sequences.key_row(p.v, of_v, batch, head_kv, 0), p.v_row, keys}};
#pragma unroll 1
    for (int first = warp_index() * 8; first < (huge ? kRows : min(kRows, queries)); first += kThreads / 4) {
        RowSum sums[2];
        sum_rows<kHeadDim, kHeadDimV>(sums, rows, first, first_query, p.scale_log2, chain);
        if (lane_index() >= 8) continue;  // each of these has one row
        const RowSum own = lane_index() < 4 ? sums[0] : sums[1];
        const int row = first + lane_index() % 4 * 2 + lane_index() / 4;
        const i64 index = sequences.lse_offset(batch, head) + first_query + row;
        const bool exists = row < queries, huge_row = exists && is_huge_lse(p.lse[index]);
        row_shift[row] = huge_row ? own.maximum : 0.0f;
        if (huge_row) row_lse[row] = log_sum_exp(0.0f, own.row_sum, {1.0f, 0.0f}) * 1.44269504f;
        if (exists) row_delta[row] = own.d_p * normaliser(own.row_sum) - (p.d_lse == nullptr ? 0.0f : p.d_lse[index]);
    }
}

// ==== tile/warpgroup/pipeline.cuh ====================================================================================

// A pipeline of stages in shared memory between producers, which fill them, and consumers, which use them up: a full and an empty mbarrier
// for each stage. The names follow CUTLASS's PipelineTmaAsync, but producer_acquire only waits, producer_expect announces the bytes, and
// both states begin with parity 0.

__device__ __forceinline__ void wait(SharedAddress barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {}
}

// Which stage a producer or a consumer comes to next, and the parity of that stage's phase.
template <int kStages>
struct PipelineState {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <int kStages>
struct Pipeline {
    static constexpr int kBytes = kStages * 16;
    SharedAddress barriers;

    __device__ __forceinline__ SharedAddress full(u32 stage) const { return barriers + stage * 16; }
    __device__ __forceinline__ SharedAddress empty(u32 stage) const { return barriers + stage * 16 + 8; }

    // One thread calls this. `producers` threads expect bytes in each stage or commit it; `consumers` threads release it.
    __device__ __forceinline__ void initialise(int producers, int consumers) const {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(full(stage), producers);
            mbarrier_init(empty(stage), consumers);
        }
    }
    // A producer waits until the stage is empty. Then it says how many bytes its copies will bring, or commits what threads have written.
    __device__ __forceinline__ void producer_acquire(const PipelineState<kStages>& state) const {
        wait(empty(state.stage), state.parity ^ 1);
    }
    __device__ __forceinline__ void producer_expect(const PipelineState<kStages>& state, u32 bytes) const {
        mbarrier_arrive_expect_tx(full(state.stage), bytes);
    }
    __device__ __forceinline__ void producer_commit(u32 stage, bool elected) const {
        if (elected) mbarrier_arrive(full(stage));
    }
    // A consumer waits until the stage is full, and releases it.
    __device__ __forceinline__ void consumer_wait(const PipelineState<kStages>& state) const { wait(full(state.stage), state.parity); }
    __device__ __forceinline__ void consumer_release(u32 stage, bool elected) const {
        if (elected) mbarrier_arrive(empty(stage));
    }
};

// ==== tile/warpgroup/panel_tile.cuh ==================================================================================

// A tile in shared memory as tensor copies with 128-byte swizzle write it and wgmma reads it: panels of 64 columns, one after the other,
// each kRows rows of 128 bytes. Within a panel the 16-byte chunks of row r are permuted: chunk c lies at c xor r % 8.

template <int kRows, int kColumns>
struct PanelTile {
    static constexpr int kPanels = (kColumns + 63) / 64, kPanelBytes = kRows * 128, kBytes = kPanels * kPanelBytes;
    SharedAddress base;

    // Loads a tile, all columns. coordinate1 and coordinate2 are row and head of the first row; in Q's map under PackGQA head and row. What
    // lies outside of the tensor becomes zeros.
    __device__ __forceinline__ void load(const TensorMap& map, SharedAddress barrier, int coordinate1, int coordinate2, int batch) const {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            cp_async_bulk_tensor_load(base + panel * kPanelBytes, map, barrier, panel * 64, coordinate1, coordinate2, batch);
    }
    // Descriptor of the K-major operand of step `step` of the contraction: columns 16 * step and on, rows from `row` on, a multiple of 8.
    __device__ __forceinline__ u64 k_major(int row, int step) const {
        return matrix_descriptor(base, row * 128 + step / 4 * kPanelBytes + step % 4 * 32);
    }
    // Descriptor of the MN-major operand of step `step` of the contraction: rows 16 * step and on, all columns.
    __device__ __forceinline__ u64 mn_major(int step) const { return matrix_descriptor(base, step * 16 * 128, kPanelBytes); }
    __device__ __forceinline__ SharedAddress at(int row, int chunk) const { return base + row * 128 + ((chunk ^ row % 8) * 16); }
};

// ==== tile/warpgroup/gemm.cuh ========================================================================================

// The two matrix products of attention, for one warpgroup and its 64 query rows: S = Q K^T and O += P V. Both are issued, not waited for.
// In the backward pass the first one computes S^T = K Q^T and dP^T = V dO^T, with 64 keys as rows: there `queries` is K or V, `keys` is Q
// or dO.

// S = Q K^T over kColumns columns, for the rows of Q from `row` on.
template <class Element, int kColumns, class QueryTile, class KeyTile, int kKeyTiles>
__device__ __forceinline__ void gemm_scores(float (&S)[kKeyTiles][4], QueryTile queries, int row, KeyTile keys) {
    launder(queries.base);  // else the descriptors of all steps, which change rarely, would occupy registers
    launder(keys.base);
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step)
        wgmma_ss<Element, kKeyTiles * 8>(S, queries.k_major(row, step), keys.k_major(0, step), step > 0);
}

// ==== tile/warp/score_gradients.cuh ==================================================================================

// From S^T and dP^T of a warp to P^T and dS^T. Their rows are keys, their columns queries: a lane holds two neighbouring queries of each
// column tile of 8, whose statistics it reads from shared memory.

// S = -inf where the chain says that a query does not see a key. `first_key` and `first_query` are the positions of s[0][0] of this warp.
template <class Chain, int kRowTiles, int kTiles>
__device__ __forceinline__ void mask_transposed(float (&s)[kRowTiles][kTiles][4], int first_key, int first_query, const Chain& chain) {
    const int key = first_key + lane_index() / 4, query = first_query + lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (!chain.visible(query + j * 8 + e % 2, key + i * 16 + e / 2 * 8)) s[i][j][e] = -infinity();
}

// S - row_shift: of tiles that have huge rows. `row_shift` is in global memory, of the first column's query.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void shift_transposed(float (&s)[kRowTiles][kTiles][4], const float* row_shift) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float shift = row_shift[j * 8 + lane_index() % 4 * 2 + e];
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) s[i][j][e] -= shift, s[i][j][e + 2] -= shift;
        }
}

// P = exp2(S * scale_log2 - row_lse), in the place of S. `row_lse` is in shared memory, of the first column's query.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void exponentiate(float (&s)[kRowTiles][kTiles][4], float scale_log2, SharedAddress row_lse) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        float lse[2];
        load_shared_pair(lse[0], lse[1], row_lse + (j * 8 + lane_index() % 4 * 2) * 4);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[i][j][e] = ex2_approx_ftz(fmaf(s[i][j][e], scale_log2, -lse[e % 2]));
    }
}

// dS = P * (dP - row_delta), in the place of dP. Not scaled: the sums over dS are, once.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void differentiate(float (&dp)[kRowTiles][kTiles][4], const float (&P)[kRowTiles][kTiles][4],
                                              SharedAddress row_delta) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        float delta[2];
        load_shared_pair(delta[0], delta[1], row_delta + (j * 8 + lane_index() % 4 * 2) * 4);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) dp[i][j][e] = P[i][j][e] * (dp[i][j][e] - delta[e % 2]);
    }
}

// Rounds two neighbouring column tiles: they are then the left operand of a product over their 16 queries.
template <class Element, int kRowTiles, int kTiles>
__device__ __forceinline__ void round_to_operand(u32 (&a)[kRowTiles][4], const float (&x)[kRowTiles][kTiles][4], int slice) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float(&tile)[4] = x[i][slice * 2 + r / 2];
            a[i][r] = cvt_rn_x2<Element>(tile[r % 2 * 2], tile[r % 2 * 2 + 1]);
        }
}

// ==== tile/warpgroup/transposed_operand.cuh ==========================================================================

// A transposed accumulator, with keys or columns of the head as rows and queries as columns, on its way to other products: as an operand in
// registers, and through shared memory as a tile with a row for each query.

// Rounds: two neighbouring column tiles of an accumulator are an operand of 16 queries.
template <class Element, int kTiles>
__device__ __forceinline__ void round_to_operand(u32 (&operand)[kTiles / 2][4], const float (&x)[kTiles][4]) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) operand[j / 2][j % 2 * 2 + h] = cvt_rn_x2<Element>(x[j][h * 2], x[j][h * 2 + 1]);
}

// product += operand * rows, over 16 queries a step, those from kBegin to kEnd. Issued, not waited for.
template <class Element, int kBegin, int kEnd, class RowTile, int kSteps, int kTiles>
__device__ __forceinline__ void gemm_over_queries(float (&product)[kTiles][4], const u32 (&operand)[kSteps][4], RowTile rows) {
    launder(rows.base);
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) wgmma_rs<Element, kTiles * 8>(product, operand[step], rows.mn_major(step), 1);
}

// Stores a warp's 16 rows as columns `first_column` (a multiple of 16) and on of a tile.
template <class Tile, int kSteps>
__device__ __forceinline__ void store_transposed(const Tile& tile, int first_column, const u32 (&operand)[kSteps][4]) {
    const int lane = lane_index(), row = lane % 8 + lane / 16 * 8, chunk = first_column % 64 / 8 + lane / 8 % 2;
    const SharedAddress own = PanelTile<16, 64>{tile.base + first_column / 64 * Tile::kPanelBytes}.at(row, chunk);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        stmatrix_x4_trans(own + step * 16 * 128, operand[step][0], operand[step][1], operand[step][2], operand[step][3]);
}

// ==== tile/warpgroup/query_gradient.cuh ==============================================================================

// dQ = dS K of a tile of queries, added up over key tiles in memory. Its sum lies there in the order in which warps hold their
// accumulators, so that what a warp adds at once is contiguous; whoever rounds it holds the same accumulators.
//
// dQ comes in units of 64 rows of an accumulator. Where a tile has 128 queries, a unit is 64 of them and all columns. Else dQ is
// transposed, dQ^T = K^T dS^T, and a unit is 64 columns and all queries: then any multiple of 16 queries will do. Each of two warpgroups
// computes half of the units; where their number is odd, both compute the middle one, for half of the queries each.

// dQ as warps hold it that round it: one for each 16 rows of a unit.
template <class Element, int kQueries, int kColumns>
struct QueryGradient {
    static constexpr bool kTransposed = kQueries != 128;
    static constexpr int kWarps = kTransposed ? kColumns / 16 : kQueries / 16;
    static constexpr int kTiles = kTransposed ? kQueries / 8 : kColumns / 8;  // column tiles of an accumulator
    static constexpr int kFloats = kQueries * kColumns;                       // of a tile of queries in memory

    float dQ[kTiles][4];

    // `d_q_sum`: of this tile of queries; `warp`: among those of all units.
    __device__ __forceinline__ static float* own_sums(float* d_q_sum, int warp) { return d_q_sum + warp * kTiles * 128 + lane_index() * 4; }
    __device__ __forceinline__ void load(float* d_q_sum, int warp) {
        const uint4* own = reinterpret_cast<const uint4*>(own_sums(d_q_sum, warp));
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const uint4 v = own[j * 32];
            const u32 bits[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) dQ[j][e] = __uint_as_float(bits[e]);
        }
    }
    // Rounds dQ * scale of a warp into a tile that has a row for each query.
    template <class Tile>
    __device__ __forceinline__ void store(const Tile& tile, int warp, float scale) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) dQ[j][e] *= scale;
        u32 rounded[kTiles / 2][4];
        round_to_operand<Element>(rounded, dQ);
        store_rounded(tile, warp, 0, rounded);
    }
    // Puts a warp's rounded column tiles from `first` (even) on into the tile.
    template <class Tile, int kSteps>
    __device__ __forceinline__ static void store_rounded(const Tile& tile, int warp, int first, const u32 (&rounded)[kSteps][4]) {
        if constexpr (kTransposed) {
            store_transposed(Tile{tile.base + first * 8 * 128}, warp * 16, rounded);
        } else {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const int lane = lane_index(), column = first + step * 2;
                const PanelTile<kQueries, 64> panel{tile.base + column / 8 * Tile::kPanelBytes};
                stmatrix_x4(panel.at(warp * 16 + lane % 16, column % 8 + lane / 16), rounded[step][0], rounded[step][1], rounded[step][2],
                            rounded[step][3]);
            }
        }
    }
};

// What a warpgroup computes of dQ.
template <class Element, int kQueries, int kColumns>
struct QueryGradientShare {
    using Sums = QueryGradient<Element, kQueries, kColumns>;
    static constexpr int kUnits = Sums::kTransposed ? (kColumns + 63) / 64 : kQueries / 64, kOwn = kUnits / 2;  // of it alone
    static constexpr int kTiles = Sums::kTiles, kHalf = kUnits % 2 * kTiles / 2;  // column tiles of a unit, and of half of one

    float dQ[kOwn * kTiles + kHalf][4];  // its own units, then what it has of the middle one

    __device__ __forceinline__ static int first_unit(int warpgroup) { return warpgroup * (kUnits - kOwn); }

    // Issued, not waited for. `dS` has a row for each query, `keys` one for each key.
    template <class DScoresTile, class KeyTile>
    __device__ __forceinline__ void gemm(DScoresTile dS, KeyTile keys, int warpgroup) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) gemm_of_unit<kTiles>(i * kTiles, dS, 0, keys, first_unit(warpgroup) + i);
        if constexpr (kHalf > 0) gemm_of_unit<kHalf>(kOwn * kTiles, dS, warpgroup * kHalf * 8, keys, kOwn);
    }
    // `d_q_sum`: of this tile of queries; `warp`: among those of both warpgroups.
    __device__ __forceinline__ void add_to(float* d_q_sum, int warp) const {
        launder(warp);  // else places in memory, which are needed once a tile, would be kept in registers
        const int warpgroup = warp / 4;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) add_of_unit<kTiles>(i * kTiles, d_q_sum, first_unit(warpgroup) + i, warp % 4, 0);
        if constexpr (kHalf > 0) add_of_unit<kHalf>(kOwn * kTiles, d_q_sum, kOwn, warp % 4, warpgroup * kHalf);
    }

  private:
    // Column tiles of the accumulator from `first` on, for all queries or those from `first_query` on.
    template <int kCount, class DScoresTile, class KeyTile>
    __device__ __forceinline__ void gemm_of_unit(int first, DScoresTile dS, int first_query, KeyTile keys, int unit) {
        float(&product)[kCount][4] = reinterpret_cast<float(&)[kCount][4]>(dQ[first]);
        if (Sums::kTransposed) keys.base += unit * KeyTile::kPanelBytes;
        launder(dS.base);
        launder(keys.base);
#pragma unroll
        for (int step = 0; step < KeyTile::kPanelBytes / 128 / 16; ++step) {
            if constexpr (Sums::kTransposed)
                wgmma_ss_trans_a<Element, kCount * 8>(product, keys.mn_major(step), dS.k_major(first_query, step), step > 0);
            else
                wgmma_ss_trans_b<Element, kCount * 8>(product, dS.k_major(unit * 64, step), keys.mn_major(step), step > 0);
        }
    }
    // Where the head dim ends within the last unit, some warps have no columns of it in memory.
    template <int kCount>
    __device__ __forceinline__ void add_of_unit(int first, float* d_q_sum, int unit, int warp, int first_tile) const {
        if (Sums::kWarps < kUnits * 4 && unit * 4 + warp >= Sums::kWarps) return;
        float* own = Sums::own_sums(d_q_sum, unit * 4 + warp) + first_tile * 128;
#pragma unroll
        for (int j = 0; j < kCount; ++j) red_add_f32_v4(own + j * 128, dQ[first + j]);
    }
};

// ==== tile/warpgroup/backward_beside.cuh =============================================================================

// The kernels beside the main one of a backward pass, which have a block for each query tile of each head: preprocess, before it, writes
// what it needs of each query and zeroes the sums of dQ; postprocess, after it, rounds these, unless the main kernel does
// (background_rounding.cuh).

struct HeadTile {
    int tile, head, batch;

    template <class Parameters>
    __device__ __forceinline__ static HeadTile of_block(const Parameters& p) {
        const int head_and_batch = divide(block_index(), p.query_tiles_reciprocal);
        const int batch = divide(head_and_batch, p.heads_q_reciprocal);
        return {block_index() - head_and_batch * p.query_tiles, head_and_batch - batch * p.heads_q, batch};
    }
};

// row_lse of a query tile in memory: one for each row, and a flag that says whether some row is huge, so that row_shift is there, too.
template <int kBlockQ>
struct RowLse {
    static constexpr int kRows = kBlockQ, kFlag = kRows, kFloats = kRows + 4, kBytes = kFloats * 4;  // of whole 16 bytes
};

// `kSums`: fp32 numbers of a tile's dQ.
template <int kThreads, int kBlockQ, int kHeadDim, int kHeadDimV, int kSums, class Chain, class Parameters>
__device__ __forceinline__ void preprocess(const Parameters& p, const Chain& chain) {
    const HeadTile work = HeadTile::of_block(p);
    const DenseSequences sequences{p.len_q, p.len_kv, p.heads_q, p.query_tiles};
    const int batch = work.batch, head = work.head, first_query = work.tile * kBlockQ, queries = sequences.len_q(batch) - first_query;
    const i64 index = sequences.first_tile(batch, head) + work.tile, row = sequences.lse_offset(batch, head) + first_query;
    const Strides of_out{p.out_batch, p.out_head, p.out_row}, of_d_out{p.d_out_batch, p.d_out_head, p.d_out_row};
    float* row_lse = p.row_lse + index * RowLse<kBlockQ>::kFloats;
    write_zeros<kThreads, kSums>(p.d_q_sum + index * kSums);
    write_row_statistics<kThreads, kBlockQ, kHeadDimV>(
        row_lse, p.row_delta + index * kBlockQ, sequences.query_row(p.out, of_out, batch, head, first_query), p.out_row,
        sequences.query_row(p.d_out, of_d_out, batch, head, first_query), p.d_out_row, p.lse + row,
        p.d_lse == nullptr ? nullptr : p.d_lse + row, queries);

    const bool huge = any_huge_row<kBlockQ>(p.lse + row, queries);
    if (thread_index() < 4) row_lse[RowLse<kBlockQ>::kFlag + thread_index()] = huge ? 1.0f : 0.0f;
    if (!unlikely(huge || sequences.len_kv(batch) <= kFewKeys)) return;
    barrier_sync();  // row_lse and row_delta are written: those of some rows are replaced
    write_exact_rows<kThreads, kBlockQ, kHeadDim, kHeadDimV>(row_lse, p.row_delta + index * kBlockQ, p.row_shift + index * kBlockQ, p,
                                                             sequences, batch, head, first_query, huge, chain);
}

// `Gradient` is what a warp of the main kernel held of dQ; `QueryTile` a tile of as many queries in shared memory.
template <int kBlockQ, class Gradient, class QueryTile, class Parameters>
__device__ __forceinline__ void postprocess(const Parameters& p) {
    SharedRegions regions;
    const QueryTile rows{regions.take(QueryTile::kBytes)};
    const HeadTile work = HeadTile::of_block(p);
    const DenseSequences sequences{p.len_q, p.len_kv, p.heads_q, p.query_tiles};
    Gradient gradient;
    gradient.load(p.d_q_sum + (sequences.first_tile(work.batch, work.head) + work.tile) * Gradient::kFloats, warp_index());
    gradient.store(rows, warp_index(), p.scale);
    fence_proxy_async();
    barrier_sync();
    if (thread_index() > 0) return;
#pragma unroll
    for (int panel = 0; panel < QueryTile::kPanels; ++panel) {
        const SharedAddress base = rows.base + panel * QueryTile::kPanelBytes;
        cp_async_bulk_tensor_store(p.d_q_map, base, panel * 64, work.tile * kBlockQ, work.head, work.batch);
    }
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();
}

// ==== tile/common/key_work.cuh =======================================================================================

// A work tile of a backward pass: a key tile of a key/value head, and the query tiles that see any of its keys, those of all
// `group` query heads that share it. The block that has it owns dK and dV of its keys.

struct KeyWork {
    int first_key, head_kv, batch;  // first_key: -1 where there is no work tile (WorkClaims)
    QueryTileRange tiles;  // of each query head

    // Under a causal mask the first key tiles see the most queries: they come first, as the last query tiles do in the forward pass. But
    // where additions to dQ have an order the last ones do, because they add first.
    template <int kBlockQ, int kBlockKv, bool kLastFirst, class Chain, class Parameters>
    __device__ __forceinline__ static KeyWork find(const Parameters& p, const Chain& chain, int index = block_index()) {
        const WorkTile work = find_work_tile(index, TileScheduler::of(p, p.key_tiles), p.heads_kv, p.heads_kv_reciprocal);
        const int first_key = (kLastFirst ? work.tile : p.key_tiles - 1 - work.tile) * kBlockKv;
        return {first_key, work.head, work.batch, chain.template query_tiles<kBlockQ>(first_key, first_key + kBlockKv, p.len_q)};
    }
};

// Where a block is on its way over query tiles: one query head after the other, `left` tiles in all.
struct HeadWalk {
    int current_head, tile, left;
    i64 index;  // the tile's place among those of all heads: [batch, heads_q, query_tiles]

    template <class Parameters>
    __device__ __forceinline__ HeadWalk(const KeyWork& work, const Parameters& p)
        : current_head(work.head_kv * p.group), tile(work.tiles.begin), left(work.tiles.count() * p.group),
          index((static_cast<i64>(work.batch) * p.heads_q + current_head) * p.query_tiles + tile) {}

    template <class Parameters>
    __device__ __forceinline__ int head(const KeyWork&, const Parameters&) const {
        return current_head;
    }
    template <class Parameters>
    __device__ __forceinline__ void advance(const KeyWork& work, const Parameters& p) {
        --left, ++tile, ++index;
        if (tile == work.tiles.end) tile = work.tiles.begin, ++current_head, index += p.query_tiles - work.tiles.count();
    }
};

// ==== tile/warpgroup/backward_inputs.cuh =============================================================================

// What a work tile of a backward pass reads, in shared memory: its key tile, which stays until its end, and query tiles that go through the
// stages of two pipelines. A stage of queries has row_lse beside it, one of dO row_delta. The first of them bring K and V, too.

template <class Key, class Value, class Query, class DOut, class Lse, class Walk, int kStages>
struct BackwardInputs {
    static constexpr int kDeltaBytes = Lse::kRows * 4;  // of row_delta, for a query tile
    SharedAddress keys, values, queries, d_out, row_lse, row_delta;
    Pipeline<kStages> query_pipeline, d_out_pipeline;

    __device__ __forceinline__ explicit BackwardInputs(SharedRegions& regions)
        : keys(regions.take(Key::kBytes)), values(regions.take(Value::kBytes)), queries(regions.take(kStages * Query::kBytes)),
          d_out(regions.take(kStages * DOut::kBytes)) {}
    // Smaller than a tile: behind all tiles, which begin at multiples of 1024 bytes.
    __device__ __forceinline__ void take_rows(SharedRegions& regions) {
        row_lse = regions.take(kStages * Lse::kBytes);
        row_delta = regions.take(kStages * kDeltaBytes);
        query_pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
        d_out_pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
    }
    // By one thread. `consumers`: warps that release a stage.
    __device__ __forceinline__ void initialise(int consumers) const {
        query_pipeline.initialise(1, consumers);
        d_out_pipeline.initialise(1, consumers);
        fence_mbarrier_init();
    }

    __device__ __forceinline__ Key key_tile() const { return {keys}; }
    __device__ __forceinline__ Value value_tile() const { return {values}; }
    __device__ __forceinline__ Query query_tile(u32 stage) const { return {queries + stage * Query::kBytes}; }
    __device__ __forceinline__ DOut d_out_tile(u32 stage) const { return {d_out + stage * DOut::kBytes}; }
    __device__ __forceinline__ SharedAddress lse(u32 stage) const { return row_lse + stage * Lse::kBytes; }
    __device__ __forceinline__ SharedAddress delta(u32 stage) const { return row_delta + stage * kDeltaBytes; }
    // Whether a tile has huge rows, so that row_shift is to be subtracted from its scores.
    __device__ __forceinline__ bool huge(u32 stage) const { return load_shared(lse(stage) + Lse::kFlag * 4) != 0; }

    // By one thread: loads all that the consumers read.
    template <class Parameters>
    __device__ __forceinline__ void produce(const Parameters& p, const KeyWork& work) const {
        PipelineState<kStages> state;
        produce<false>(p, work, state, [&] { return work; });
    }
    // The same for one of a persistent block's work tiles. Its K and V come after its first Q and dO, once wait_keys() has returned: until
    // then consumers may read those of the work tile before. wait_keys() reads `work` again, so that registers need not keep all of it.
    template <bool kPersistent = true, class Parameters, class WaitKeys>
    __device__ __forceinline__ void produce(const Parameters& p, const KeyWork& work, PipelineState<kStages>& state,
                                            const WaitKeys& wait_keys) const {
        bool first = true;  // the first Q and dO do not depend on the preprocess kernel, which may still run; row_lse and row_delta do
#pragma unroll 1
        for (Walk next(work, p); next.left > 0; next.advance(work, p)) {
            const int row = next.tile * Lse::kRows;
            const SharedAddress queries_full = query_pipeline.full(state.stage), d_out_full = d_out_pipeline.full(state.stage);
            auto load_lse = [&] {
                cp_async_bulk_load(lse(state.stage), p.row_lse + next.index * Lse::kFloats, Lse::kBytes, queries_full);
            };
            auto load_delta = [&] {
                cp_async_bulk_load(delta(state.stage), p.row_delta + next.index * Lse::kRows, kDeltaBytes, d_out_full);
            };
            query_pipeline.producer_acquire(state);
            query_pipeline.producer_expect(state, Query::kBytes + Lse::kBytes + (first ? Key::kBytes : 0));
            auto load_keys = [&](const KeyWork& of) { key_tile().load(p.k_map, queries_full, of.first_key, of.head_kv, of.batch); };
            auto load_values = [&](const KeyWork& of) { value_tile().load(p.v_map, d_out_full, of.first_key, of.head_kv, of.batch); };
            if (first && !kPersistent) load_keys(work);
            if (!first) load_lse();  // before the tile, which takes longer
            query_tile(state.stage).load(p.q_map, queries_full, row, next.head(work, p), work.batch);

            d_out_pipeline.producer_acquire(state);
            d_out_pipeline.producer_expect(state, DOut::kBytes + kDeltaBytes + (first ? Value::kBytes : 0));
            if (first && !kPersistent) load_values(work);
            if (!first) load_delta();
            d_out_tile(state.stage).load(p.d_out_map, d_out_full, row, next.head(work, p), work.batch);

            if (first && kPersistent) {
                const KeyWork again = wait_keys();
                load_keys(again);
                load_values(again);
            }
            if (first) {
                // What the preprocess kernel wrote is visible after this, to copies, too.
                griddepcontrol_wait();
                load_lse();
                load_delta();
            }
            state.advance();
            first = false;
        }
        if (first) wait_keys();  // no query sees these keys: never so in a persistent block (WorkClaims)
    }
};

// ==== tile/warpgroup/store_columns.cuh ===============================================================================

// From a warp's accumulator of some of a gradient's columns to memory, by way of a tile in shared memory with a row for each key, which
// nobody reads at that time: the place of K or V, or that of dS where the next K and V are already on their way there.

// Rounds gradient * scale and stores the warp's 16 rows: those from `tile_row` on of the tile, from `row` on of the head. They are of
// columns from kFirst on (a multiple of 64). What lies outside of the tensor is left out. The copies may still read the tile on return.
template <class Element, int kFirst, int kTiles, class Tile>
__device__ __forceinline__ void store_columns(const TensorMap& map, const float (&gradient)[kTiles][4], float scale, const Tile& tile,
                                              int tile_row, int row, int head, int batch) {
    const SharedAddress rows = tile.base + kFirst / 64 * Tile::kPanelBytes + tile_row * 128;
    int lane = lane_index();
    launder(lane);  // else places, which are needed once, would be kept in registers
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float (&pair)[4] = gradient[j + i / 2];
            r[i] = cvt_rn_x2<Element>(pair[i % 2 * 2] * scale, pair[i % 2 * 2 + 1] * scale);
        }
        const PanelTile<16, 64> panel{rows + j / 8 * Tile::kPanelBytes};
        stmatrix_x4(panel.at(lane % 16, j % 8 + lane / 16), r[0], r[1], r[2], r[3]);
    }
    fence_proxy_async();
    barrier_warp_sync();
    if (lane > 0) return;
#pragma unroll
    for (int j = 0; j < kTiles; j += 8)
        cp_async_bulk_tensor_store(map, rows + j / 8 * Tile::kPanelBytes, kFirst + j * 8, row, head, batch);
    cp_async_bulk_commit_group();
}

// ==== tile/warpgroup/narrow_consumer.cuh =============================================================================

// A consumer of the backward kernels for head dims up to 128: one of two warpgroups that divide the keys of a work tile.

// A warpgroup, with 64 keys, whose dK and dV stay in registers. S and dP are transposed: P^T and dS^T are operands in registers.
template <class Traits, class Parameters>
struct NarrowConsumer {
    using Element = typename Traits::Element;
    using Stages = typename Traits::Stages;
    using DQShare = typename Traits::DQShare;
    static constexpr int kColumns = Traits::kColumns, kColumnsV = Traits::kColumnsV, kBlockQ = Traits::kBlockQ, kStages = Traits::kStages;
    static constexpr bool kSplit = Traits::kSplit;
    static constexpr int kConsumerThreads = 2 * 128;
    static constexpr int kConsumersMeet = 1;  // their named barrier
    // kSteps: of the products dV and dK. kEarlySteps: of dV, those issued before the barrier, to hide it.
    static constexpr int kSteps = kBlockQ / 16, kEarlySteps = kSplit ? 2 : kSteps;
    // Whether dO is released before dQ is added. Not for deterministic gradients: there the release says that dQ is added.
    static constexpr bool kReleasesEarly = !kSplit && !Traits::kDeterministic;

    const Parameters& p;
    const Stages& stages;
    const int warpgroup, warp, lane;  // warp: among those of both consumers
    PipelineState<kStages> state;
    PipelineState<Stages::kDScoresStages> d_s_state;

    __device__ __forceinline__ NarrowConsumer(const Parameters& p, const Stages& stages)
        : p(p), stages(stages), warpgroup(warp_index() / 4 - 1), warp(warp_index() - 4), lane(lane_index()) {}

    __device__ __forceinline__ void consumer_wait(const PipelineState<kStages>& next) const {
        stages.query_pipeline.consumer_wait(next);
        stages.d_out_pipeline.consumer_wait(next);
    }
    // By each warp: its lanes have read row_lse or row_delta.
    __device__ __forceinline__ void release(const Pipeline<kStages>& pipeline) const {
        barrier_warp_sync();
        pipeline.consumer_release(state.stage, lane == 0);
    }
    __device__ __forceinline__ static void barrier() { bar_sync(kConsumersMeet, kConsumerThreads); }

    // dK, without its scale, and dV of the warpgroup's keys; adds their dQ to the sums in memory.
    __device__ __forceinline__ void walk(const KeyWork& work, float (&dK)[kColumns / 8][4], float (&dV)[kColumnsV / 8][4]) {
        const auto chain = Traits::make_chain(p.len_q, p.len_kv);
        const int first_key = work.first_key + warpgroup * 64;
        const QueryTileRange tiles = chain.template query_tiles<kBlockQ>(first_key, first_key + 64, p.len_q);  // of this warpgroup's keys
        float S[1][kBlockQ / 8][4], dP[1][kBlockQ / 8][4];
        u32 P[kBlockQ / 16][4], dS[kBlockQ / 16][4];
        auto wait_d_v = [&] {
            wgmma_wait_group<kSplit ? 1 : 0>();
            launder(dV);
        };
        typename Traits::Walk next(work, p);
        if (next.left > 0) consumer_wait(state);
#pragma unroll 1
        while (next.left > 0) {
            const auto queries = stages.query_tile(state.stage);
            const auto d_out = stages.d_out_tile(state.stage);
            const auto d_s_tile = stages.d_s_tile(d_s_state.stage);

            wgmma_fence();
            gemm_scores<Element, kColumns>(S[0], stages.key_tile(), warpgroup * 64, queries);
            wgmma_commit_group();
            wgmma_fence();
            gemm_scores<Element, kColumnsV>(dP[0], stages.value_tile(), warpgroup * 64, d_out);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            launder(S[0]);
            if (unlikely(tiles.needs_mask(next.tile) || stages.huge(state.stage))) {  // one branch: each holds up the products
                if (stages.huge(state.stage)) shift_transposed(S, p.row_shift + next.index * kBlockQ);
                if (tiles.needs_mask(next.tile)) mask_transposed(S, work.first_key + warp * 16, next.tile * kBlockQ, chain);
            }
            exponentiate(S, p.scale_log2, stages.lse(state.stage));
            round_to_operand<Element>(P, S[0]);
            wgmma_wait_group<0>();
            launder(dP[0]);
            differentiate(dP, S, stages.delta(state.stage));
            round_to_operand<Element>(dS, dP[0]);
            store_transposed(d_s_tile, warp * 16, dS);

            launder(dV);
            launder(P);
            wgmma_fence();
            gemm_over_queries<Element, 0, kEarlySteps>(dV, P, d_out);
            wgmma_commit_group();
            // dS of both consumers is here then. One barrier a tile is enough, for two stages of dS: nobody comes here again before its dQ
            // of this tile is complete.
            fence_proxy_async();
            barrier();
            if (!kSplit) wait_d_v();  // dQ takes the registers of P; issued behind dV it would be no faster
            if (kReleasesEarly) release(stages.d_out_pipeline);

            DQShare d_q;
            wgmma_fence();
            d_q.gemm(d_s_tile, stages.key_tile(), warpgroup);
            wgmma_commit_group();
            if (kSplit) {
                launder(P);
                gemm_over_queries<Element, kEarlySteps, kSteps>(dV, P, d_out);
                wgmma_commit_group();
            }
            launder(dK);
            launder(dS);
            wgmma_fence();
            gemm_over_queries<Element, 0, kSteps>(dK, dS, queries);
            wgmma_commit_group();
            wgmma_wait_group<kSplit ? 2 : 1>();
            launder(d_q.dQ);
            if constexpr (Traits::kDeterministic) stages.keeper.wait_turn(state);
            d_q.add_to(p.d_q_sum + next.index * DQShare::Sums::kFloats, warp);  // while products are under way
            if (kSplit) wait_d_v();
            if (!kReleasesEarly) release(stages.d_out_pipeline);

            // What the next tile needs is awaited here: between products, each instruction would hold them up.
            PipelineState<kStages> following = state;
            following.advance();
            next.advance(work, p);
            if (next.left > 0) consumer_wait(following);
            wgmma_wait_group<0>();
            launder(dK);
            release(stages.query_pipeline);
            state = following;
            d_s_state.advance();
        }
    }
};

using Lse = RowLse<kBlockQ>;
using KeyTile = PanelTile<kBlockKv, kColumns>;
using ValueTile = PanelTile<kBlockKv, kColumnsV>;
using QueryTile = PanelTile<kBlockQ, kColumns>;
using DOutTile = PanelTile<kBlockQ, kColumnsV>;
using DQ = QueryGradient<Element, kBlockQ, kColumns>;
using Inputs = BackwardInputs<KeyTile, ValueTile, QueryTile, DOutTile, Lse, HeadWalk, kStages>;

constexpr int kRowThreads = 128, kRowBlocksPerSm = 1024 / kRowThreads;

// ---- row_lse, row_delta, row_shift; d_q_sum = 0 -------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kRowThreads, kRowBlocksPerSm)
attention_backward_sm90_bf16_d64_causal_bq128_s2_sp0_sm_90a_preprocess(const __grid_constant__ RowParameters p) {
    griddepcontrol_launch_dependents();
    preprocess<kRowThreads, kBlockQ, kHeadDim, kHeadDimV, DQ::kFloats>(p, make_chain<kCausal>(p.len_q, p.len_kv));
}

// ---- dK, dV and the sum of dQ -------------------------------------------------------------------------------------------

// What producer and consumers share.
struct Stages : Inputs {
    static constexpr int kDScoresStages = 2;
    using DScoresTile = PanelTile<kBlockQ, kBlockKv>;
    SharedAddress dS;
    __device__ __forceinline__ explicit Stages(SharedRegions& regions)
        : Inputs(regions), dS(regions.take(kDScoresStages * DScoresTile::kBytes)) {
        take_rows(regions);
    }
    __device__ __forceinline__ DScoresTile d_s_tile(u32 stage) const { return {dS + stage * DScoresTile::kBytes}; }
};

// What a consumer needs to know of this kernel.
struct Traits {
    using Element = ::Element;
    using Stages = ::Stages;
    using DQShare = QueryGradientShare<Element, ::kBlockQ, ::kColumns>;
    using Walk = HeadWalk;
    static constexpr int kColumns = ::kColumns, kColumnsV = ::kColumnsV, kBlockQ = ::kBlockQ, kStages = ::kStages;
    static constexpr bool kSplit = false;  // of the product of dV, about that of dQ
    static constexpr bool kDeterministic = false;

    __device__ __forceinline__ static auto make_chain(int len_q, int len_kv) { return ::make_chain<kCausal>(len_q, len_kv); }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_backward_sm90_bf16_d64_causal_bq128_s2_sp0_sm_90a(const __grid_constant__ Parameters p) {
    griddepcontrol_launch_dependents();
    SharedRegions regions;
    const Stages stages(regions);
    if (thread_index() == 0) stages.initialise(kWarpgroups * 4);
    barrier_sync();
    constexpr bool kLastFirst = false;
    const KeyWork work = KeyWork::find<kBlockQ, kBlockKv, kLastFirst>(p, make_chain<kCausal>(p.len_q, p.len_kv));
    if (warp_index() < 4) {
        setmaxnreg_dec<kProducerRegisters>();
        if (thread_index() == 0) stages.produce(p, work);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        griddepcontrol_wait();  // for row_shift, and for zeros to add to
        NarrowConsumer<Traits, Parameters> consumer(p, stages);
        float dK[kColumns / 8][4] = {}, dV[kColumnsV / 8][4] = {};
        consumer.walk(work, dK, dV);
        consumer.barrier();  // nobody reads K and V any more
        const int row = consumer.warp * 16, key = work.first_key + row;
        store_columns<Element, 0>(p.d_v_map, dV, 1.0f, stages.value_tile(), row, key, work.head_kv, work.batch);
        store_columns<Element, 0>(p.d_k_map, dK, p.scale, stages.key_tile(), row, key, work.head_kv, work.batch);
        if (lane_index() == 0) cp_async_bulk_wait_group_read<0>();
    }
}

// ---- dQ = scale * d_q_sum -----------------------------------------------------------------------------------------------

constexpr int kSumThreads = DQ::kWarps * 32, kSumBlocksPerSm = (DQ::kTiles > 12 ? 512 : DQ::kTiles > 8 ? 768 : 1024) / kSumThreads;

extern "C" __global__ void __launch_bounds__(kSumThreads, kSumBlocksPerSm)
attention_backward_sm90_bf16_d64_causal_bq128_s2_sp0_sm_90a_postprocess(const __grid_constant__ SumParameters p) {
    griddepcontrol_wait();
    postprocess<kBlockQ, DQ, QueryTile>(p);
}
