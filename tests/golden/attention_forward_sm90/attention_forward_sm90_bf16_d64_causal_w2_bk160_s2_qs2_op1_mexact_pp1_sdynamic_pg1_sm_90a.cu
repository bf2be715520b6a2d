// attention_forward_sm90_bf16_d64_causal_w2_bk160_s2_qs2_op1_mexact_pp1_sdynamic_pg1_sm_90a
//
// Attention forward for Hopper, as in FlashAttention-3 (Shah et al. 2024), algorithms 1 and 2:
//   S = Q K^T, causal mask,  out = softmax(scale * S) V,  lse = log(sum(exp(scale * S))) for each row.
// The first warpgroup is the producer: one thread issues the TMA loads, and a warp for each consumer writes its lse.
// Each of the other 2 warpgroups, the consumers, computes 64 rows of O. They are what `warpgroups` counts below.
// A work tile is 128 rows of Q, with all keys that they see.
// A K block is 160 of these keys; the mask calls it a key tile.
// Thread blocks are persistent, and the pipeline of a consumer does not drain between the work tiles of its thread block.
//
//   problem  bf16_d64_causal
//   config   warpgroups 2, block_kv 160, stages 2, query_stages 2, out_panels 1, row_max exact, ping_pong true,
//            scheduler dynamic, pack_gqa 1
//   target   sm_90a
//   launch   <<<min(work tiles, SMs * 1), 384, 132288 bytes>>>
//            work tiles: ceil(len_q / 128) * heads_q * batch
//            bytes of shared memory: of all regions of ForwardStorage together
//   parts    atoms/ptx: types, register, index, shared_memory, barrier, named_barrier, mbarrier, cp_async_bulk_tensor,
//              setmaxnreg, wgmma, stmatrix, atomic, cvt, ex2, mul, shfl_sync, vote_sync
//            tile/common: shared_regions, tile_scheduler, sequences, score_chain, mask, softmax_rows, lse, settled_row
//            tile/warpgroup: pipeline, panel_tile, gemm, row_sums, stale_softmax, epilogue, forward_storage,
//              forward_producer, forward_lse, forward_consumer

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

__device__ __forceinline__ uint4 load_shared_v4(SharedAddress address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void store_shared_v4(SharedAddress address, const uint4& value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
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

// Arrives without waiting.
__device__ __forceinline__ void bar_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
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

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

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

// ==== atoms/ptx/stmatrix.cuh =========================================================================================

// Stores four 8x8 matrices of 16-bit elements from a warp's registers to shared memory. PTX ISA, "stmatrix" (sm_90).
//
// Lane l gives the address of row l % 8 of matrix l / 8, 16 bytes. Its r[i] holds row l / 4, columns 2 * (l % 4) and the next, of matrix i.
__device__ __forceinline__ void stmatrix_x4(SharedAddress row, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// ==== atoms/ptx/atomic.cuh ===========================================================================================

// Words of global memory that blocks share. PTX ISA, "Memory Consistency Model"; "ld", "st" and "atom" with
// .acquire, .release and .gpu (sm_70).

__device__ __forceinline__ void st_release_gpu(u32* address, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}

// Adds, both an acquire and a release. The word as it was before.
__device__ __forceinline__ u32 atom_add_acq_rel_gpu(u32* address, u32 value) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(address)), "r"(value)
                 : "memory");
    return before;
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

// The value of lane 0, which the compiler then knows to be the same in all lanes. All 32 lanes take part.
__device__ __forceinline__ int shfl_sync_first(int value) { return __shfl_sync(0xffffffff, value, 0); }

// ==== atoms/ptx/vote_sync.cuh ========================================================================================

// Votes of a warp. PTX ISA, "vote.sync".

// Whether `predicate` holds for any of the 32 lanes. All take part.
__device__ __forceinline__ bool vote_sync_any(bool predicate) { return __any_sync(0xffffffff, predicate); }

// ---- shapes of instructions that these kernels use ------------------------------------------------------------------

template <>
__device__ __forceinline__ void wgmma_ss<Bf16, 160>(float (&d)[20][4], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %82, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
        "}, %80, %81, p, 1, 1, 0, 0;\n"  // p: accumulate; then scale a, scale b, transpose a, transpose b
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]),
          "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3])
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

// O += P V.
template <class Element, class ValueTile, int kSteps, int kOutTiles>
__device__ __forceinline__ void gemm_output(float (&O)[kOutTiles][4], const u32 (&P)[kSteps][4], ValueTile values) {
    launder(values.base);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        wgmma_rs<Element, kOutTiles * 8>(O, P[step], values.mn_major(step), 1);
}

// ==== tile/common/mask.cuh ===========================================================================================

// What the chain makes of S in the forward kernels, whose rows are queries.

// S = -inf where the chain hides a key from a query. `first_key` is the key of this warp's first column, `first_position` the position of
// its first row in the sequence: each query has kPackGqa of them, under PackGQA one for each head.
template <int kPackGqa = 1, class Chain, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void mask_scores(float (&S)[kRowTiles][kKeyTiles][4], int first_position, int first_key, const Chain& chain) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int query = (first_position + i * 16 + e / 2 * 8 + lane / 4) / kPackGqa;
            const KeyRange seen = chain.keys(query);
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                const int key = first_key + j * 8 + lane % 4 * 2 + e % 2;
                if (key >= seen.end || (Chain::kHidesFirstKeys && key < seen.begin)) S[i][j][e] = -infinity();
            }
        }
}

// ==== tile/common/softmax_rows.cuh ===================================================================================

// What kernels share of softmax's rows: their origin, and in online softmax the running row max, and reductions over the quad of lanes that
// holds a row of S.

// Conditional rescaling: where softmax looks at the maximum of S, a warp's row maxima move only if S * scale_log2 exceeds one of them by
// more than this, FlashAttention-4's threshold. P is then at most 2^8, which fp16 holds.
constexpr float kHeadroom = 8.0f;

// The row max before the first key that a row sees. It is finite, because -inf - (-inf) would be NaN, and the maximum of every row that is
// not huge exceeds it.
constexpr float kInitialRowMax = -3.0e38f;

// One fused multiply-add computes an exponent, S * scale_log2 - row_max, where row_max is maximum * scale_log2, rounded. A large row_max
// has a large rounding error: from 2^31 on it can reach half an ulp = 2^7, and 2^(2^7) overflows fp32. So a huge row first subtracts the
// maximum itself, without the scale: its exponent is (S - shift) * scale_log2, with row_max = 0. All other rows have shift = 0.
struct Origin {
    float shift, row_max;
};

// A row is huge if the absolute value of its maximum * scale_log2 is at least this. Below it, rounding the maximum changes an exponent by
// at most 2^-12 and P by at most 1.7e-4 of it, less than half an fp16 ulp just below 1 (2^-12): so the P of the maximum is still 1.
constexpr float kHuge = 0x1p13f;

// Whether a row with this maximum is huge; maximum_log2 = maximum * scale_log2. A row that sees no key, with a maximum of -inf, is not,
// nor is one whose maximum is NaN: the second comparison excludes both. So >= would do as well as !(<), which is what has been measured.
__device__ __forceinline__ bool is_huge(float maximum, float maximum_log2) {
    return !(fabsf(maximum_log2) < kHuge) && maximum > -infinity();
}

// The origin for a maximum. If fp32 cannot hold maximum * scale, the row becomes NaN, as in plain PyTorch: by 0 * inf. The product is taken
// with ln2_hi first, as maximum_log2 may overflow where maximum * scale does not.
__device__ __forceinline__ Origin origin_at(float maximum, float scale_log2, float ln2_hi) {
    const float maximum_log2 = mul_rn(maximum, scale_log2);
    if (!is_huge(maximum, maximum_log2)) return {0.0f, maximum_log2};
    return {fmaf(0.0f, mul_rn(maximum, ln2_hi) * scale_log2, maximum), 0.0f};
}

// Tells the compiler that a condition hardly ever holds, so that it keeps the code that depends on it out of the way of the rest.
__device__ __forceinline__ bool unlikely(bool condition) { return __builtin_expect(condition, false); }

// Raises a row's origin to `maximum` if that is higher. Returns the factor that rescales the row's sum and its row of O.
__device__ __forceinline__ float move_origin(Origin& origin, float maximum, float scale_log2, float ln2_hi) {
    const bool had_no_key = origin.row_max == kInitialRowMax;
    // +inf for the first key; NaN if there is still none, with a maximum of -inf: then the origin stays.
    const float height = had_no_key ? maximum + infinity() : fmaf(maximum - origin.shift, scale_log2, -origin.row_max);
    if (!(height > 0.0f)) return 1.0f;
    const Origin before = origin;
    origin = origin_at(maximum, scale_log2, ln2_hi);
    return had_no_key ? 0.0f : ex2_approx_ftz(fmaf(before.shift - origin.shift, scale_log2, before.row_max - origin.row_max));
}

// The maximum of this lane's scores in row lane/4 + h*8. Two chains of comparisons take half the time of one.
template <int kKeyTiles>
__device__ __forceinline__ float lane_max(const float (&S)[kKeyTiles][4], int h) {
    float partial[2] = {fmaxf(S[0][h * 2], S[0][h * 2 + 1]), fmaxf(S[1][h * 2], S[1][h * 2 + 1])};
#pragma unroll
    for (int j = 2; j < kKeyTiles; ++j) partial[j % 2] = fmaxf(partial[j % 2], fmaxf(S[j][h * 2], S[j][h * 2 + 1]));
    return fmaxf(partial[0], partial[1]);
}

// Reductions over the quad of lanes that holds a row.
__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, shfl_sync_bfly(value, 1));
    return fmaxf(value, shfl_sync_bfly(value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
    value += shfl_sync_bfly(value, 1);
    return value + shfl_sync_bfly(value, 2);
}

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

// ==== tile/common/settled_row.cuh ====================================================================================

// The row max of a row whose row sum is complete, for its log-sum-exp.

// In lse an exponent errs in proportion to its distance from the row max, as scale_log2 is rounded. A row max that was kept for long may
// be far from the keys that have most of the weight: it goes to where 2^4 such keys would be, by a whole number. What rounds away there
// joins the total (Knuth's TwoSum). A row max that is hardly another stays, as lse of one key has no error then; and so do those of rows
// without keys, with a total of 0, and of rows whose total is negated.
__device__ __forceinline__ void settle(float& row_max, float& total) {
    if (!(total > 0.0f) || total >= 0.5f && total < 32.0f) return;
    const int power = (__float_as_int(total) >> 23) - 127 - 4;
    const float by = static_cast<float>(power), before = row_max;
    row_max = before + by;
    const float added = row_max - before, rest = (before - (row_max - added)) + (by - added);
    total *= __int_as_float((127 - power) << 23);
    total = fmaf(total, rest * 0.693147181f, total);
}

// ==== tile/warpgroup/row_sums.cuh ====================================================================================

// The row statistics that a consumer hands to its LSE writer: row sum and row max, through shared memory.

// A huge row has its shift in the place of row_max, and its total negated (see Origin).
struct RowStatistics {
    float total, row_max;

    __device__ __forceinline__ Origin origin() const { return total < 0.0f ? Origin{row_max, 0.0f} : Origin{0.0f, row_max}; }
};

// Two rows of a warp's 16, eight apart. A warpgroup has 32 such pairs, in the order of its warps and rows.
struct PairStatistics {
    RowStatistics rows[2];

    // All threads of the consumer call this, for the rows lane/4 and lane/4 + 8 of their warps; the quad of a row holds the same values.
    __device__ __forceinline__ void store(SharedAddress statistics) const {
        if (lane_index() % 4) return;
        const int pair = thread_index() / 32 % 4 * 8 + lane_index() / 4;
        store_shared_v4(statistics + pair * 16, {__float_as_uint(rows[0].total), __float_as_uint(rows[0].row_max),
                                                 __float_as_uint(rows[1].total), __float_as_uint(rows[1].row_max)});
    }
    // The LSE writer's lanes take one pair each, whose first row is first_row_of_pair().
    __device__ __forceinline__ static PairStatistics load(SharedAddress statistics) {
        const uint4 v = load_shared_v4(statistics + lane_index() * 16);
        return {{{__uint_as_float(v.x), __uint_as_float(v.y)}, {__uint_as_float(v.z), __uint_as_float(v.w)}}};
    }
    __device__ __forceinline__ static int first_row_of_pair() { return lane_index() / 8 * 16 + lane_index() % 8; }
};

// ==== tile/warpgroup/stale_softmax.cuh ===============================================================================

// Online softmax in base 2 with conditional rescaling: the row max moves where S exceeds it by more than kHeadroom. Config row_max: with
// `exact` every K block looks for that; with `stale` (kStaleRowMax) the first K block of a work tile and those with a mask do, and later
// ones keep the row max. The row sum, which is needed anyway, tells when that row max has become too low: only then a warp
// computes P of this block again, from the same S and a new row max, and rescales O and the row sum. After kRenewals of these, or one
// where links change scores within the exponential, every later block of the work tile updates the row max. Each warp decides by its own
// rows: a flag that warps share would be seen early or late, and results would differ from run to run.

// A lane whose partial row sum over a stale block reaches this limit has its warp compute P again. Below 2^15 no P would overflow fp16, and
// bf16 holds any. But the rounding of an exponent grows with its height above the row max, and where scores rise towards the keys that have
// most of a row's weight, it is most of lse's error.
__device__ __forceinline__ float sum_limit() { return 0x1p15f; }

// How far a stale row max is above the scores of its block. Scores that go on rising reach the limit later then, and exponents, which are
// rounded alike up to 16, may be as far below the row max as they may be above it. But P in fp16, which is normal from 2^-14 on, has no
// bits to lose: many keys far below the highest one may have much of a row's weight.
template <class Element>
__device__ __forceinline__ float row_lift();
template <>
__device__ __forceinline__ float row_lift<Bf16>() { return 15.0f; }
template <>
__device__ __forceinline__ float row_lift<Fp16>() { return 0.0f; }

constexpr int kRenewals = 4;

// The statistics of a thread's two rows, lane/4 + h*8 of its warp's 16. The quad of lanes that holds a row has the same row max; each lane
// sums its own columns, and `finish` adds the four sums up.
template <class Element, bool kStaleRowMax>
struct OnlineSoftmax {
    float row_max[2];    // scale_log2 * the maximum of S when it was last updated, rounded; 0 in a huge row
    float shift[2];      // see Origin; valid if `huge`
    // compensation: what the additions to row_sum rounded away, exactly where row_sum >= the addend (Dekker 1971)
    float row_sum[2], compensation[2];
    float factor[2];     // rescales O, if needs_rescale
    bool needs_rescale;  // the last block updated a row max, or may have: the warp is huge; the same in the whole warp
    int renewals;  // how many are left; without one each later K block of this work tile updates the row max
    bool huge;  // some block's maximum was huge in a row of the warp: from then on each block is treated as if it had a huge row
    float scale_log2, ln2_hi;

    __device__ __forceinline__ OnlineSoftmax(float scale_log2, float ln2_hi)
        : needs_rescale(false), scale_log2(scale_log2), ln2_hi(ln2_hi) {
        restart();
    }

    // A new work tile begins.
    __device__ __forceinline__ void restart() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row_max[h] = kInitialRowMax;
            shift[h] = 0.0f;
            row_sum[h] = compensation[h] = 0.0f;
        }
        renewals = kRenewals;
        huge = false;
    }

    // If the maximum of S exceeds the row max by more than kHeadroom in some row of the warp, every row whose maximum is higher than its
    // row max takes it. In a warp with a huge row this needs no headroom, and each row's shift is subtracted from S, too: so call it only
    // once for each S.
    template <int kKeyTiles>
    __device__ __forceinline__ void update_row_max(float (&S)[kKeyTiles][4], float lift) {
        float maximum[2], maximum_log2[2];
        bool above = false, any_huge = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            maximum[h] = quad_max(lane_max(S, h));
            maximum_log2[h] = mul_rn(maximum[h], scale_log2);
            above |= maximum_log2[h] - row_max[h] > kHeadroom;
            any_huge |= is_huge(maximum[h], maximum_log2[h]);
        }
        huge |= vote_sync_any(any_huge);
        needs_rescale = vote_sync_any(above);
        if (unlikely(huge)) {
            update_huge_row_max(S, maximum);
        } else if (needs_rescale) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float next = fmaxf(row_max[h], maximum_log2[h] + lift);
                rescale_sum(h, ex2_approx_ftz(row_max[h] - next));
                row_max[h] = next;
            }
        }
    }
    template <int kKeyTiles>
    __device__ __forceinline__ void update_huge_row_max(float (&S)[kKeyTiles][4], const float (&maximum)[2]) {
        // Every later block must come here, too, since S loses the shift here. A row that does not move has a factor of 1.
        needs_rescale = true;
        renewals = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Origin origin{shift[h], row_max[h]};
            rescale_sum(h, move_origin(origin, maximum[h], scale_log2, ln2_hi));
            shift[h] = origin.shift;
            row_max[h] = origin.row_max;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                S[j][h * 2] -= shift[h];
                S[j][h * 2 + 1] -= shift[h];
            }
        }
    }
    // Rescales the row sum, and keeps the factor by which `rescale` rescales O once its product is complete.
    __device__ __forceinline__ void rescale_sum(int h, float by) {
        factor[h] = by;
        const float factor_of_sum = fmaf(by, kEx2Bias, by);  // 1 stays 1
        row_sum[h] *= factor_of_sum;
        compensation[h] *= factor_of_sum;
    }

    // P = exp2(S * scale_log2 - row_max) of a K block, rounded to Element, as the operand of P V: two neighbouring column tiles of the
    // accumulator layout make one operand. Adds P to the row sums. `new_rows`: for some rows this may be their first block.
    template <int kKeyTiles>
    __device__ __forceinline__ void exp2_and_sum(u32 (&P)[kKeyTiles / 2][4], float (&S)[kKeyTiles][4], bool new_rows) {
        bool updates_row_max = !kStaleRowMax || new_rows || renewals == 0;
        const float lift = kStaleRowMax && renewals > 0 ? row_lift<Element>() : 0.0f;
        needs_rescale = false;
        float partial[2][2];
#pragma unroll 1
        for (;;) {  // a loop, so that the code of the exponentials is there once
            if (updates_row_max) update_row_max(S, lift);
            partial[0][0] = partial[0][1] = partial[1][0] = partial[1][1] = 0.0f;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float low = ex2_approx_ftz(fmaf(S[j][h * 2], scale_log2, -row_max[h]));
                    const float high = ex2_approx_ftz(fmaf(S[j][h * 2 + 1], scale_log2, -row_max[h]));
                    partial[h][0] += low;
                    partial[h][1] += high;
                    P[j / 2][j % 2 * 2 + h] = cvt_rn_x2<Element>(low, high);
                }
#pragma unroll
            for (int h = 0; h < 2; ++h) partial[h][0] += partial[h][1];
            if (!kStaleRowMax || updates_row_max) break;
            const bool fits = partial[0][0] < sum_limit() && partial[1][0] < sum_limit();
            if (!vote_sync_any(!fits)) break;
            updates_row_max = true;
            --renewals;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float before = row_sum[h];
            row_sum[h] = before + partial[h][0];
            compensation[h] += partial[h][0] - (row_sum[h] - before);
        }
    }

    template <int kOutTiles>
    __device__ __forceinline__ void rescale(float (&O)[kOutTiles][4]) const {
#pragma unroll
        for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) O[j][e] *= factor[e / 2];
    }

    // The factors that normalise O, and the row statistics from which the LSE writer computes lse.
    __device__ __forceinline__ PairStatistics finish(float (&normalisers)[2]) const {
        PairStatistics statistics;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            statistics.rows[h] = {quad_sum(row_sum[h] + compensation[h]), row_max[h]};
            normalisers[h] = normaliser(statistics.rows[h].total);
            if (unlikely(huge) && shift[h] != 0.0f) statistics.rows[h] = {-statistics.rows[h].total, shift[h]};
        }
        return statistics;
    }
};

// ==== tile/warpgroup/epilogue.cuh ====================================================================================

// The epilogue of a consumer warp: from O in registers through a ring of panels in shared memory, 64 columns each, to global memory by
// tensor copies.

using OutPanel = PanelTile<16, 64>;  // 16 rows, those of a warp

// Rounds O * normalisers of a panel's columns into shared memory, and sets them to zero.
template <class Element, int kOutTiles>
__device__ __forceinline__ void round_panel(float (&O)[kOutTiles][4], const float (&normalisers)[2], int panel, OutPanel to, int lane) {
#pragma unroll
    for (int chunk = 0; chunk < 8; chunk += 2) {
        const int j = panel * 8 + chunk;
        if (j >= kOutTiles) break;
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float (&pair)[4] = O[j + i / 2];
            r[i] = cvt_rn_x2<Element>(pair[i % 2 * 2] * normalisers[i % 2], pair[i % 2 * 2 + 1] * normalisers[i % 2]);
            pair[i % 2 * 2] = pair[i % 2 * 2 + 1] = 0.0f;
        }
        stmatrix_x4(to.at(lane % 16, chunk + lane / 16), r[0], r[1], r[2], r[3]);
    }
}

// One lane begins a panel's copy. The coordinates are those of the first row in the tensor map.
__device__ __forceinline__ void copy_panel(const TensorMap& map, OutPanel from, int panel, int coordinate1, int coordinate2, int batch) {
    cp_async_bulk_tensor_store(map, from.base, panel * 64, coordinate1, coordinate2, batch);
    cp_async_bulk_commit_group();
}
// Rounds O * normalisers and stores the warp's 16 rows; the copies leave out rows behind the sequence, and columns outside of the tensor.
// `ring` has kRingPanels panels, which no other warp uses, and which the copies may still read on return. Sets O to zero. kOneFence: if the
// ring has all panels, one fence is for all of them, and the first copy waits for the last panel.
template <class Element, int kRingPanels, bool kOneFence, int kOutTiles, class... Coordinates>
__device__ __forceinline__ void store_output(const TensorMap& map, float (&O)[kOutTiles][4], const float (&normalisers)[2],
                                             SharedAddress ring, Coordinates... coordinates) {
    constexpr int kPanels = (kOutTiles + 7) / 8;
    int lane = lane_index();
    launder(lane);  // else addresses in the ring, which are needed once a work tile, would occupy registers
    if constexpr (kOneFence && kPanels == kRingPanels) {
        if (lane == 0) cp_async_bulk_wait_group_read<0>();
        barrier_warp_sync();
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            round_panel<Element>(O, normalisers, panel, {ring + panel * OutPanel::kBytes}, lane);
        fence_proxy_async();
        barrier_warp_sync();
        if (lane != 0) return;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) copy_panel(map, {ring + panel * OutPanel::kBytes}, panel, coordinates...);
    } else {
        // Each call begins with the ring's first panel. Where the panels of a call fill the ring a whole number of times, that panel's copy
        // is the oldest one, and all others may be pending; else the call waits for all.
        constexpr int kFirstPending = kPanels % kRingPanels == 0 ? kRingPanels - 1 : 0;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            const OutPanel box{ring + panel % kRingPanels * OutPanel::kBytes};
            if (panel == 0) {
                if (lane == 0) cp_async_bulk_wait_group_read<kFirstPending>();
            } else {
                if (lane == 0) cp_async_bulk_wait_group_read<kRingPanels - 1>();
            }
            barrier_warp_sync();
            round_panel<Element>(O, normalisers, panel, box, lane);
            fence_proxy_async();
            barrier_warp_sync();
            if (lane == 0) copy_panel(map, box, panel, coordinates...);
        }
    }
}

// ==== tile/warpgroup/forward_storage.cuh =============================================================================

// What the roles of the warp-specialised forward kernel share: the work tiles of a thread block, and its shared memory.

// A Q tile and its K blocks, [lowest_block(), end_block); a K block is what the mask calls a key tile. end_block >= 1 even if every key is
// masked, so that the epilogue runs; end_block == 0 marks the end of the work. Row r of the tile is query first_query + r / kPackGqa of
// head first_head + r % kPackGqa.
template <class Traits>
struct WorkTileInfo {
    static constexpr int kBytes = 16, kPackGqa = Traits::kPackGqa;
    int first_query, first_head, batch, end_block;

    template <class Parameters>
    __device__ __forceinline__ static WorkTileInfo find(const Parameters& p, int index) {
        const WorkTile work = find_work_tile(index, TileScheduler::of(p, p.query_tiles), p.head_sets, p.head_sets_reciprocal);
        WorkTileInfo info{work.tile * Traits::kQueries, work.head * kPackGqa, work.batch, 0};
        info.end_block = max(info.blocks(p).end, 1);
        return info;
    }
    template <class Parameters>
    __device__ __forceinline__ auto chain(const Parameters& p) const {
        const auto sequences = Traits::sequences(p);
        return make_chain<Traits::kCausal>(sequences.len_q(batch), sequences.len_kv(batch));
    }
    // K blocks that the tile's queries see.
    template <class Parameters>
    __device__ __forceinline__ auto blocks(const Parameters& p) const {
        return chain(p).template key_tiles<Traits::kQueries, Traits::kBlockKv>(first_query);
    }
    // K blocks are visited from end_block - 1 down to this one.
    template <class Parameters>
    __device__ __forceinline__ int lowest_block(const Parameters& p) const {
        if constexpr (!decltype(chain(p))::kHidesFirstKeys) return 0;
        return min(blocks(p).begin, end_block - 1);
    }
    // Coordinates 1, 2 and 3 of a row in the tensor maps of Q and O, where the column is coordinate 0: (query, head), or under PackGQA
    // (head, query) where kPackGqa divides the row: it divides a warp's first one, as it divides 16.
    static_assert(16 % kPackGqa == 0, "a warp's rows are whole queries");
    __device__ __forceinline__ int coordinate1(int row = 0) const { return kPackGqa == 1 ? first_query + row : first_head; }
    __device__ __forceinline__ int coordinate2(int row = 0) const { return kPackGqa == 1 ? first_head : first_query + row / kPackGqa; }
    __device__ __forceinline__ int coordinate3() const { return batch; }

    __device__ __forceinline__ static WorkTileInfo load(SharedAddress slot) {
        const uint4 v = load_shared_v4(slot);
        return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), static_cast<int>(v.w)};
    }
    __device__ __forceinline__ void store(SharedAddress slot) const {
        store_shared_v4(slot, {static_cast<u32>(first_query), static_cast<u32>(first_head), static_cast<u32>(batch),
                               static_cast<u32>(end_block)});
    }
};

// The persistent tile scheduler: which work tile this thread block takes after `index`. Its first tile is that of its own index. For each
// tile that it loads it makes one claim, late, so that blocks that run ahead take more tiles: `tiles` claims in all. Claim n, from 0,
// gets tile launched_blocks + n, and the last launched_blocks claims find none. Whoever makes claim `tiles` - 1 resets the counter.
template <class Traits, class Parameters>
__device__ __forceinline__ int next_work_tile(const Parameters& p, int index) {
    if (!Traits::kDynamic) return index + p.launched_blocks;
    // A claim publishes nothing else, so relaxed order would do, but atoms/ptx has no relaxed addition.
    const int earlier_claims = static_cast<int>(atom_add_acq_rel_gpu(p.tile_counter, 1));
    if (earlier_claims == p.tiles - 1) st_release_gpu(p.tile_counter, 0);  // the next launch begins at 0
    return earlier_claims + p.launched_blocks;
}

// Slots for WorkTileInfo. When a consumer releases Q of work tile t, these are in use: the slots of the kQueryStages tiles after t, whose Q
// is loaded or will be; that of t; and that of t - 1, whose O is not stored yet (see ForwardConsumer::release_q). An LSE writer has read
// the slot of t - 2: the consumer waited for that before it handed over the statistics of t - 1.
template <class Traits>
constexpr int kWorkSlots = Traits::kQueryStages + 2;

// Shared memory: tiles, pipelines and slots for WorkTileInfo. A row's softmax statistics are 8 bytes, handed from consumers to LSE writers.
template <class Traits>
struct ForwardStorage {
    using QueryTile = typename Traits::QueryTile;
    using KeyTile = typename Traits::KeyTile;
    using ValueTile = typename Traits::ValueTile;
    static constexpr int kStages = Traits::kStages, kQueryStages = Traits::kQueryStages, kConsumers = Traits::kConsumers;
    static constexpr int kOutBytes = Traits::kOutPanels * PanelTile<16, 64>::kBytes;  // for each consumer warp
    static constexpr int kStatisticsBytes = 64 * 8;                                  // for each consumer
    static_assert(sizeof(PairStatistics) * 32 == kStatisticsBytes, "32 pairs of rows");
    static_assert(sizeof(WorkTileInfo<Traits>) == WorkTileInfo<Traits>::kBytes, "stored as one vector");

    SharedAddress q_tiles, k_tiles, v_tiles, out, statistics;
    Pipeline<kQueryStages> q_pipeline;
    Pipeline<kStages> k_pipeline, v_pipeline;
    SharedAddress statistics_barriers;  // of a Pipeline<1> for each consumer, which fills it; its LSE writer empties it
    SharedAddress work_slots;

    // All threads call this: each computes the addresses. One thread initialises the pipelines, for all after the next barrier.
    __device__ __forceinline__ explicit ForwardStorage(SharedRegions& regions) {
        q_tiles = regions.take(kQueryStages * QueryTile::kBytes);
        k_tiles = regions.take(kStages * KeyTile::kBytes);
        v_tiles = regions.take(kStages * ValueTile::kBytes);
        out = regions.take(kConsumers * 4 * kOutBytes);
        statistics = regions.take(kConsumers * kStatisticsBytes);
        q_pipeline.barriers = regions.take(Pipeline<kQueryStages>::kBytes);
        k_pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
        v_pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
        statistics_barriers = regions.take(kConsumers * Pipeline<1>::kBytes);
        work_slots = regions.take(kWorkSlots<Traits> * WorkTileInfo<Traits>::kBytes);
    }
    __device__ __forceinline__ void initialise() const {
        // Each warp of a consumer releases Q, since its lanes also read the work slot. Only products read K and V, and they complete for
        // the whole warpgroup: one thread of a consumer releases them, as in CUTLASS's PipelineTmaAsync. Each warp commits its rows'
        // statistics.
        q_pipeline.initialise(1, kConsumers * 4);
        k_pipeline.initialise(1, kConsumers);
        v_pipeline.initialise(1, kConsumers);
        for (int i = 0; i < kConsumers; ++i) statistics_pipeline(i).initialise(4, 1);
        fence_mbarrier_init();
    }
    __device__ __forceinline__ Pipeline<1> statistics_pipeline(int consumer) const {
        return {statistics_barriers + consumer * Pipeline<1>::kBytes};
    }
    __device__ __forceinline__ SharedAddress statistics_of(int consumer) const { return statistics + consumer * kStatisticsBytes; }
    __device__ __forceinline__ SharedAddress work_slot(u32 slot) const { return work_slots + slot * WorkTileInfo<Traits>::kBytes; }
    __device__ __forceinline__ QueryTile query_tile(u32 stage) const { return {q_tiles + stage * QueryTile::kBytes}; }
    __device__ __forceinline__ KeyTile key_tile(u32 stage) const { return {k_tiles + stage * KeyTile::kBytes}; }
    __device__ __forceinline__ ValueTile value_tile(u32 stage) const { return {v_tiles + stage * ValueTile::kBytes}; }
};

// ==== tile/warpgroup/forward_producer.cuh ============================================================================

// The producer of the warp-specialised forward kernel: one thread that loads Q, K and V by tensor copies (FlashAttention-3, algorithm 1).

// Loads in the order in which consumers ask for tiles, for all work tiles of this thread block: K and V blocks from the last to the first,
// V one block behind K, and Q right after the first K block, so that K need not wait for a stage of Q, which may become free later.
template <class Traits, class Parameters>
__device__ __forceinline__ void produce(const Parameters& p, const ForwardStorage<Traits>& smem) {
    using Storage = ForwardStorage<Traits>;
    using Work = WorkTileInfo<Traits>;
    PipelineState<Traits::kQueryStages> q_state;
    PipelineState<kWorkSlots<Traits>> slot;  // index of a work slot; its parity is unused, as Q's pipeline guards the slots
    PipelineState<Traits::kStages> k_state, v_state;
    int v_block = -1, v_head = 0, v_batch = 0;
    auto load_v = [&] {
        if (v_block < 0) return;
        smem.v_pipeline.producer_acquire(v_state);
        smem.v_pipeline.producer_expect(v_state, Storage::ValueTile::kBytes);
        smem.value_tile(v_state.stage).load(p.v_map, smem.v_pipeline.full(v_state.stage), v_block * Traits::kBlockKv, v_head, v_batch);
        v_state.advance();
    };
    prefetch_tensormap(p.q_map);
    prefetch_tensormap(p.k_map);
    prefetch_tensormap(p.v_map);
    int index = block_index();
#pragma unroll 1
    while (index < p.tiles) {
        const Work work = Work::find(p, index);
        const int head_kv = divide(work.first_head, p.group_reciprocal);
        const int last_block = work.end_block - 1, lowest_block = work.lowest_block(p);
        int next = index;
#pragma unroll 1
        for (int k_block = last_block; k_block >= lowest_block; --k_block) {
            smem.k_pipeline.producer_acquire(k_state);
            smem.k_pipeline.producer_expect(k_state, Storage::KeyTile::kBytes);
            const SharedAddress k_full = smem.k_pipeline.full(k_state.stage);
            smem.key_tile(k_state.stage).load(p.k_map, k_full, k_block * Traits::kBlockKv, head_kv, work.batch);
            k_state.advance();
            if (k_block == last_block) {
                smem.q_pipeline.producer_acquire(q_state);
                work.store(smem.work_slot(slot.stage));  // those who wait for Q see it, by the arrival of producer_expect
                slot.advance();
                smem.q_pipeline.producer_expect(q_state, Storage::QueryTile::kBytes);
                const SharedAddress q_full = smem.q_pipeline.full(q_state.stage);
                smem.query_tile(q_state.stage).load(p.q_map, q_full, work.coordinate1(), work.coordinate2(), work.batch);
                q_state.advance();
            }
            // The claim's latency stalls this thread, while consumers work on the stages that are full. The claim is made with the last K
            // block but one, where there are two, so that its latency does not add to that of finding the next work tile.
            if (k_block == min(lowest_block + 1, last_block)) next = next_work_tile<Traits>(p, index);
            load_v();
            v_block = k_block, v_head = head_kv, v_batch = work.batch;
        }
        index = next;
    }
    load_v();  // still due, being one block behind K
    // The end of the work: a slot with end_block == 0, announced by a stage of Q without a Q.
    smem.q_pipeline.producer_acquire(q_state);
    Work{}.store(smem.work_slot(slot.stage));
    smem.q_pipeline.producer_commit(q_state.stage, true);
}

// ==== tile/warpgroup/forward_lse.cuh =================================================================================

// The LSE writer of the warp-specialised forward kernel. A consumer hands its row statistics over and goes on: logarithms between two work
// tiles would leave the tensor cores idle.

// One warp writes lse for the 64 rows of a consumer, in every work tile of this thread block.
template <class Traits, class Parameters>
__device__ __forceinline__ void write_lse(const Parameters& p, const ForwardStorage<Traits>& smem, int consumer) {
    constexpr int kPackGqa = Traits::kPackGqa;
    const Pipeline<1> pipeline = smem.statistics_pipeline(consumer);
    PipelineState<1> state;
    PipelineState<kWorkSlots<Traits>> slot;  // index of a work slot
#pragma unroll 1
    for (;;) {
        pipeline.consumer_wait(state);
        // The slot is visible, too: the consumer saw it, by its wait for Q, before it committed the statistics.
        const auto work = WorkTileInfo<Traits>::load(smem.work_slot(slot.stage));
        if (work.end_block == 0) return;
        slot.advance();
        PairStatistics statistics = PairStatistics::load(smem.statistics_of(consumer));
        barrier_warp_sync();
        pipeline.consumer_release(state.stage, lane_index() == 0);
        state.advance();
        const auto sequences = Traits::sequences(p);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = consumer * 64 + PairStatistics::first_row_of_pair() + i * 8, query = work.first_query + row / kPackGqa;
            settle(statistics.rows[i].row_max, statistics.rows[i].total);  // a huge row has its own maximum, and its total negated
            const float lse = log_sum_exp(statistics.rows[i].origin(), fabsf(statistics.rows[i].total), p.scale_log2, p.ln2_hi, p.ln2_lo);
            const int head = work.first_head + row % kPackGqa;
            if (query < sequences.len_q(work.batch)) p.lse[sequences.lse_offset(work.batch, head) + query] = lse;
        }
    }
}

// ==== tile/warpgroup/forward_consumer.cuh ============================================================================

// A consumer of the warp-specialised forward kernel: one warpgroup and its 64 rows of every work tile of this thread block. S, P and O
// stay in registers.

template <class Traits, class Parameters>
struct ForwardConsumer {
    using Element = typename Traits::Element;
    using Work = WorkTileInfo<Traits>;
    using Chain = decltype(Work{}.chain(Parameters{}));
    using Blocks = decltype(Work{}.blocks(Parameters{}));
    static constexpr int kBlockKv = Traits::kBlockKv, kPackGqa = Traits::kPackGqa;
    static constexpr int kOwnQueries = 64 / kPackGqa;  // distinct queries in a consumer's rows
    // Barrier kFirstBarrier + i is consumer i's turn: its 128 threads wait, and those of the consumer before it arrive.
    static constexpr int kFirstBarrier = 1, kPingPongThreads = 2 * 128;
    static_assert(!Traits::kPingPong || Traits::kConsumers > 1, "ping-pong scheduling takes two consumers");
    static_assert(!Traits::kPingPong || Traits::kStages > 1,
                  "one stage deadlocks: a consumer holds its turn until V comes, and the other frees V's stage only in its own next turn");
    using Fragment = u32[kBlockKv / 16][4];  // P as an operand of P V

    const Parameters& p;
    const ForwardStorage<Traits>& smem;
    const int consumer;
    const bool elected;
    PipelineState<Traits::kQueryStages> q_state;
    PipelineState<kWorkSlots<Traits>> slot;  // index of the next work slot
    PipelineState<Traits::kStages> k_state, v_state;
    PipelineState<1> statistics_state;
    OnlineSoftmax<Element, Traits::kStaleRowMax> softmax;
    float S[1][kBlockKv / 8][4];              // one row tile, 16 rows of each warp: mask_scores takes several
    float O[Traits::kColumnsV / 8][4] = {};
    Fragment P[2];                            // one is multiplied with V while softmax writes the other
    SharedAddress current = 0, finished = 0;  // slots of the current work tile, and of the one whose O is to be stored
    int first_query, k_block, lowest_block;   // of the current work tile
    Chain chain;                              // of its sequence
    // K blocks that this consumer's rows see, for the mask alone: every consumer visits all blocks of the work tile, as the turns of
    // ping-pong scheduling and the releases of K and V must match in number.
    Blocks own_blocks;
    float normalisers[2];
    bool store_pending = false;  // once the P V under way is complete, O is the finished work tile's, and retire_pv stores it
    int v_stage_in_use = -1;     // that the P V under way reads

    __device__ __forceinline__ ForwardConsumer(const Parameters& p, const ForwardStorage<Traits>& smem, int consumer)
        : p(p), smem(smem), consumer(consumer), elected(thread_index() % 128 == 0), softmax(p.scale_log2, p.ln2_hi) {}

    // One iteration of FlashAttention-3, algorithm 2 (lines 8 to 15): S = Q K^T of this block runs beside O += P V of the block before, and
    // softmax runs under that product. P_prev is the paper's P_cur: P[0] and P[1] swap roles, in place of line 16. Blocks go from the last
    // to the first. The first S of a work tile overlaps the last product of the tile before, so the pipeline never drains. Line 20 is
    // finish_tile, and store_output in retire_pv. Returns false at the end of the work; P_prev is then left to `drain`.
    __device__ __forceinline__ bool iterate(Fragment& P_prev, Fragment& P_next) {
        const bool new_tile = --k_block < lowest_block;
        if (new_tile && !wait_for_work()) return false;
        wait_ping_pong();       // section 3.1: one consumer issues products while another does softmax
        issue_qk();             // lines 8, 9: S = Q K^T
        wgmma_wait_group<1>();  // lines 14, 15 of the iteration before: O += P V is complete
        retire_pv();            // rescale or store O, release V: O must be free before the next product
        // Between Q K^T and P V while the other consumer, which waits for the turn, does softmax: behind P V nothing would hide this.
        constexpr bool kEarly = Traits::kPingPong;
        if (kEarly && new_tile) change_tile();
        issue_pv(P_prev);       // lines 10, 11: O += P V
        arrive_ping_pong();
        if (!kEarly && new_tile) change_tile();
        wgmma_wait_group<1>();  // line 12: S is here
        v_stage_in_use = v_state.stage;
        v_state.advance();
        make_p(P_next, new_tile);  // line 15 for K, line 13: row_max, P, row_sum
        if (new_tile) softmax.needs_rescale = false;  // retire_pv stores O next: said here, so that the compiler drops the factors
        return true;
    }
    // The K block visited last of all has no Q K^T beside its P V (lines 18, 19).
    __device__ __forceinline__ void drain(Fragment& P_last) {
        wgmma_wait_group<0>();
        retire_pv();
        issue_pv(P_last);
        finish_tile();
        if (p.lse != nullptr) hand_statistics_over({});  // the LSE writer finds the end of the work in the next slot
        wgmma_wait_group<0>();
        v_stage_in_use = -1;  // nobody fills the stage again
        retire_pv();
        if (lane_index() == 0) cp_async_bulk_wait_group_read<0>();  // shared memory must live until the copies of O have read it
    }
    __device__ __forceinline__ void run() {
        wait_for_work();  // the grid has no more thread blocks than work tiles, so each has a first one
        begin_tile();
        // Gives consumer 0 the first turn. No other consumer has arrived at its barrier yet, so its own 128 threads do, and count a second
        // time when they wait: a named barrier counts arrivals. The last consumer's last arrival has no partner; the end of the thread
        // block drops it.
        if (Traits::kPingPong && consumer == 0) bar_arrive(kFirstBarrier, kPingPongThreads);
        issue_qk();  // lines 3 to 6
        wgmma_wait_group<0>();
        make_p(P[0], true);
        softmax.needs_rescale = false;  // O is zero
#pragma unroll 1
        for (;;) {
            if (!iterate(P[0], P[1])) return drain(P[0]);
            if (!iterate(P[1], P[0])) return drain(P[1]);
        }
    }

    // ---- the steps of an iteration ----

    __device__ __forceinline__ void wait_ping_pong() const {
        if (Traits::kPingPong) bar_sync(kFirstBarrier + consumer, kPingPongThreads);
    }
    __device__ __forceinline__ void arrive_ping_pong() const {
        if (Traits::kPingPong) bar_arrive(kFirstBarrier + (consumer + 1) % Traits::kConsumers, kPingPongThreads);
    }

    __device__ __forceinline__ void issue_qk() {
        smem.k_pipeline.consumer_wait(k_state);
        wgmma_fence();
        gemm_scores<Element, Traits::kColumns>(S[0], smem.query_tile(q_state.stage), consumer * 64, smem.key_tile(k_state.stage));
        wgmma_commit_group();
    }
    __device__ __forceinline__ void issue_pv(Fragment& P_used) {
        smem.v_pipeline.consumer_wait(v_state);
        launder(O);  // S needs none in issue_qk: its first product only writes it
        // P needs none after the product, either: it is written next from S, which make_p launders once this product is complete.
        launder(P_used);
        wgmma_fence();
        gemm_output<Element>(O, P_used, smem.value_tile(v_state.stage));
        wgmma_commit_group();
    }
    // Once S is here: masks it where own_blocks says so (see key_tiles), and computes P. One branch, and not two loops, since O, P and the
    // pipelines go from one work tile to the next within the same loop.
    __device__ __forceinline__ void make_p(Fragment& P_made, bool new_tile) {
        launder(S[0]);
        smem.k_pipeline.consumer_release(k_state.stage, elected);
        k_state.advance();
        const bool masked = own_blocks.needs_mask(k_block);
        // A block that hides first keys alone, those at the left end of a window, is no row's first one; were it, softmax would find out.
        const bool needs_row_max = masked && (!Chain::kHidesFirstKeys || k_block >= own_blocks.full_end);
        if (masked) mask_scores<kPackGqa>(S, first_query * kPackGqa + warp_row(), k_block * kBlockKv, chain);
        if (k_block == lowest_block) release_q();
        softmax.exp2_and_sum(P_made, S[0], new_tile || needs_row_max);
    }
    // Every warp releases Q for itself. Once Q of work tile t is released, the producer may write tile t + kQueryStages into
    // the slot of tile t - 2, which this warp has read for the last time: it has stored the O of tile t - 2.
    __device__ __forceinline__ void release_q() {
        barrier_warp_sync();
        smem.q_pipeline.consumer_release(q_state.stage, lane_index() == 0);
        q_state.advance();
    }
    // The P V before has completed: releases its V stage, and stores O if that was the tile's last one, else rescales it if need be.
    // Storing delays the other consumer's turn; the Q K^T just issued runs meanwhile.
    __device__ __forceinline__ void retire_pv() {
        launder(O);
        if (v_stage_in_use >= 0) smem.v_pipeline.consumer_release(v_stage_in_use, elected);
        if (store_pending) {
            const Work work = Work::load(finished);
            const int row = warp_row();
            const SharedAddress panels = smem.out + row / 16 * ForwardStorage<Traits>::kOutBytes;
            store_output<Element, Traits::kOutPanels, Traits::kPingPong>(p.out_map, O, normalisers, panels, work.coordinate1(row),
                                                                         work.coordinate2(row), work.coordinate3());
            store_pending = false;
        } else if (softmax.needs_rescale) {
            softmax.rescale(O);
        }
    }

    // ---- from one work tile to the next ----

    // From here until the next retire_pv, O, the last P V, normalisers and `finished` are the old work tile's; all else is the new one's.
    __device__ __forceinline__ void change_tile() { finish_tile(), begin_tile(); }
    // Waits for the next work tile's Q. Returns false at the end of the work.
    __device__ __forceinline__ bool wait_for_work() const {
        smem.q_pipeline.consumer_wait(q_state);
        return shfl_sync_first(Work::load(smem.work_slot(slot.stage)).end_block) > 0;
    }
    __device__ __forceinline__ void begin_tile() {
        current = smem.work_slot(slot.stage);
        slot.advance();
        const Work work = Work::load(current);
        first_query = work.first_query;
        k_block = shfl_sync_first(work.end_block) - 1;
        lowest_block = work.lowest_block(p);
        chain = work.chain(p);
        own_blocks = chain.template key_tiles<kOwnQueries, kBlockKv>(first_query + consumer * kOwnQueries);
        softmax.restart();
    }
    __device__ __forceinline__ void finish_tile() {
        const PairStatistics statistics = softmax.finish(normalisers);
        if (p.lse != nullptr) hand_statistics_over(statistics);
        finished = current;
        store_pending = true;
    }
    __device__ __forceinline__ void hand_statistics_over(const PairStatistics& statistics) {
        const Pipeline<1> pipeline = smem.statistics_pipeline(consumer);
        pipeline.producer_acquire(statistics_state);
        statistics.store(smem.statistics_of(consumer));
        barrier_warp_sync();
        pipeline.producer_commit(statistics_state.stage, lane_index() == 0);
        statistics_state.advance();
    }
    // This warp's first row within a tile: 16 for each warp before it, the producer's 4 aside. It is computed anew at each use, because
    // keeping it would cost a register.
    __device__ __forceinline__ static int warp_row() {
        int thread = thread_index();
        launder(thread);
        return thread / 32 * 16 - 64;
    }
};

// ---- the kernel -------------------------------------------------------------------------------------------------------

struct Parameters {
    TensorMap q_map;  // all maps swizzle by 128 bytes; a box is 64 columns by all rows of a tile
    TensorMap k_map;
    TensorMap v_map;
    TensorMap out_map;  // but here a box has one warp's 16 rows
    float* lse;  // [batch, heads_q, len_q], dense, or null
    u32* tile_counter;  // claims of this launch so far, 0 before and after it; launches that may overlap need one each
    u64 head_sets_reciprocal;  // x_reciprocal: for a division by x, see divide
    u64 group_reciprocal;  // group: heads_q / heads_kv, the query heads of a GQA group
    u64 l2_group_heads_reciprocal;
    u64 l2_group_tiles_reciprocal;
    int head_sets;  // heads_q / kPackGqa: sets of heads that share tiles
    int len_q;
    int len_kv;
    int query_tiles;  // of a head set
    int l2_group_heads;  // head sets of an L2 group, see TileScheduler
    int l2_group_tiles;  // work tiles of an L2 group
    int tiles;  // work tiles of the launch: query_tiles * head_sets * batch
    int launched_blocks;  // thread blocks of the grid
    float scale_log2;  // softmax scale * log2(e), more than 0
    float ln2_hi;  // ln2_hi + ln2_lo: softmax scale / scale_log2, ln 2 but for the rounding of scale_log2
    float ln2_lo;
};

// What this kernel is specialised for.
struct Traits {
    using Element = Bf16;
    static constexpr int kHeadDim = 64, kHeadDimV = 64;
    static constexpr bool kCausal = true;

    static constexpr int kConsumers = 2, kBlockKv = 160;
    // Stages of K and of V; of Q; panels of 64 columns in the ring through which a consumer warp stores O.
    static constexpr int kStages = 2, kQueryStages = 2, kOutPanels = 1;
    // Whether only masked K blocks look for a maximum after the first of a work tile.
    static constexpr bool kStaleRowMax = false;
    static constexpr bool kPingPong = true;  // consumers alternate between products and softmax
    static constexpr bool kDynamic = true;  // work tiles are claimed from a counter
    // Query heads of a GQA group that share a Q tile, interleaved along its rows; 1: no PackGQA.
    static constexpr int kPackGqa = 1;

    static constexpr int kBlockQ = kConsumers * 64, kQueries = kBlockQ / kPackGqa;  // distinct queries of a Q tile
    // A product contracts 16 columns of Q and K at a time, and stmatrix_x4 stores 16 of O.
    static constexpr int kColumns = (kHeadDim + 15) / 16 * 16, kColumnsV = (kHeadDimV + 15) / 16 * 16;
    using QueryTile = PanelTile<kBlockQ, kColumns>;
    using KeyTile = PanelTile<kBlockKv, kColumns>;
    using ValueTile = PanelTile<kBlockKv, kColumnsV>;

    __device__ __forceinline__ static DenseSequences sequences(const Parameters& p) {
        return {p.len_q, p.len_kv, p.head_sets * kPackGqa, p.query_tiles};
    }
};

constexpr int kThreads = (Traits::kConsumers + 1) * 128, kBlocksPerSm = 1;
// Of a thread, once setmaxnreg has moved some. With FlashAttention-3's 24 this producer spills where it claims work tiles.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr bool kMovesRegisters = kProducerRegisters != kConsumerRegisters;
// setmaxnreg moves registers within what the launch gives the thread block, not within all of the SM: more would have it wait for ever.
// That is 65536 / threads for each thread, rounded down to a multiple of 8.
static_assert(kProducerRegisters + Traits::kConsumers * kConsumerRegisters <=
                  65536 / (kThreads * kBlocksPerSm) / 8 * 8 * (Traits::kConsumers + 1),
              "setmaxnreg cannot hand out more than a block has");
static_assert(Traits::kConsumers <= 3, "each consumer's LSE writer is a warp of the producer's warpgroup");

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
attention_forward_sm90_bf16_d64_causal_w2_bk160_s2_qs2_op1_mexact_pp1_sdynamic_pg1_sm_90a(const __grid_constant__ Parameters p) {
    SharedRegions regions;
    const ForwardStorage<Traits> smem(regions);
    if (thread_index() == 0) smem.initialise();
    barrier_sync();
    const int warp = warp_index(), warpgroup = warp / 4;
    if (warpgroup == 0) {
        if constexpr (kMovesRegisters) setmaxnreg_dec<kProducerRegisters>();
        if (warp == 0) {
            if (thread_index() == 0) produce(p, smem);
        } else if (warp <= Traits::kConsumers && p.lse != nullptr) {
            write_lse(p, smem, warp - 1);
        }
    } else {
        if constexpr (kMovesRegisters) setmaxnreg_inc<kConsumerRegisters>();
        ForwardConsumer<Traits, Parameters>(p, smem, warpgroup - 1).run();
    }
}
