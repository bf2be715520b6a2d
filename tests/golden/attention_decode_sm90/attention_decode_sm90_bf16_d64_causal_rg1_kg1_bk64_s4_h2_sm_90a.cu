// attention_decode_sm90_bf16_d64_causal_rg1_kg1_bk64_s4_h2_sm_90a
//
// Attention forward for Hopper where few queries meet many keys, as in decoding: at the speed of the memory.
//   S = Q K^T, causal mask,  out = softmax(scale * S) V,  lse = log(sum(exp(scale * S))) for each row.
// PackGQA: the query heads of a GQA group and their queries are rows of one tile, up to 64, so that K and V are read once.
// Split keys (flash decoding): each thread block has an equal share of the key tiles of all heads, 64 keys each,
// wherever in a head that begins and ends. The block that finishes the last part of a head adds up all of them, from the first to the last.
// The first warpgroup is the producers': one thread issues the TMA loads of K and V, another one those of Q.
// The other two are consumers: each has the rows of one of two neighbouring key/value heads, whose K and V are read side by side.
//
//   problem  bf16_d64_causal
//   config   row_groups 1, key_groups 1, block_kv 64, stages 4, heads 2
//   target   sm_90a
//   launch   <<<blocks: at most the SMs, 384, 147600 bytes>>>
//            bytes of shared memory: of all regions of DecodeStorage together
//   parts    atoms/ptx: types, register, index, shared_memory, barrier, named_barrier, mbarrier, cp_async_bulk_tensor,
//              cp_async_bulk_prefetch_tensor, cp_async_bulk_tensor_evict_first, setmaxnreg, griddepcontrol, wgmma,
//              atomic, cvt, ex2, mul, shfl_sync, vote_sync
//            tile/common: shared_regions, tile_scheduler, score_chain, packed_rows, key_shares, softmax_rows, lse,
//              partial_outputs
//            tile/warpgroup: pipeline, panel_tile, gemm, row_sums, stale_softmax, decode_storage, decode_producer,
//              decode_exchange, decode_epilogue, decode_consumer

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

__device__ __forceinline__ u32 load_shared(SharedAddress address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_shared(SharedAddress address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
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

// Between ordinary writes to shared memory and asynchronous reads of it: by the writers, before those who read learn of it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ==== atoms/ptx/cp_async_bulk_prefetch_tensor.cuh ====================================================================

// Prefetches of boxes of a tensor into the L2 (TMA). PTX ISA, "cp.async.bulk.prefetch.tensor" (sm_90).

// Asks for the box that cp_async_bulk_tensor_load would read at these coordinates; nobody waits for it. Others may write there
// meanwhile: the L2 is what all SMs read and write.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor(const TensorMap& map, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::  //
                 "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// ==== atoms/ptx/cp_async_bulk_tensor_evict_first.cuh =================================================================

// Loads of boxes whose bytes the L2 gives up before others. PTX ISA, "cp.async.bulk.tensor", "createpolicy", "Cache Eviction Priority
// Hints" (sm_90).

// As cp_async_bulk_tensor_load, of what nobody reads again soon. What others have fetched meanwhile, and was not read yet, stays.
__device__ __forceinline__ void cp_async_bulk_tensor_load_evict_first(SharedAddress destination, const TensorMap& map,
                                                                      SharedAddress barrier, int column, int row, int head, int batch) {
    asm volatile(
        "{\n"
        "    .reg .b64 policy;\n"
        "    createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "    cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint\n"
        "        [%0], [%1, {%3, %4, %5, %6}], [%2], policy;\n"
        "}" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
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

// ==== atoms/ptx/griddepcontrol.cuh ===================================================================================

// Launches that overlap: one that depends on the launch before it may begin while that is under way. PTX ISA, "griddepcontrol" (sm_90).

// The launch that depends on this one may begin once all blocks have called this or ended. It says nothing of what they have written.
__device__ __forceinline__ void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Returns once the launch before has ended, and all that it wrote is there; at once where the two do not overlap.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

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

// ==== atoms/ptx/atomic.cuh ===========================================================================================

// Words of global memory that blocks share. PTX ISA, "Memory Consistency Model"; "ld", "st" and "atom" with
// .acquire, .release and .gpu (sm_70).

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

// The value of that lane, the same one in all lanes. All 32 lanes take part.
__device__ __forceinline__ float shfl_sync_idx(float value, int lane) { return __shfl_sync(0xffffffff, value, lane); }

// ==== atoms/ptx/vote_sync.cuh ========================================================================================

// Votes of a warp. PTX ISA, "vote.sync".

// Whether `predicate` holds for any of the 32 lanes. All take part.
__device__ __forceinline__ bool vote_sync_any(bool predicate) { return __any_sync(0xffffffff, predicate); }

// ---- shapes of instructions that these kernels use ------------------------------------------------------------------

template <>
__device__ __forceinline__ void wgmma_ss<Bf16, 64>(float (&d)[8][4], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n"  // p: accumulate; then scale a, scale b, transpose a, transpose b
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
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

// What this kernel is specialised for.
using Element = Bf16;

struct Parameters {
    TensorMap q_map;  // swizzles by 128 bytes, as the others; a box is 64 columns by the query heads and queries of a row tile
    TensorMap k_map;  // a box is 64 columns by the keys of a tile
    TensorMap v_map;
    Element* out;
    float* lse;  // [batch, heads_q, len_q], dense, or null
    float* partials;  // two slots for each block: see PartialOutputs; null, as the next one, where every part is a whole head
    u32* part_counters;  // for each block and row group, 0 before and after the launch; launches that may overlap need others
    i64 out_batch;  // strides of out, in elements
    i64 out_head;
    i64 out_row;
    u64 key_tiles_reciprocal;  // x_reciprocal: for a division by x, see divide
    u64 batch_reciprocal;
    u64 row_tiles_reciprocal;
    u64 head_sets_reciprocal;
    u64 tile_heads_reciprocal;
    u64 blocks_reciprocal;
    u64 aligned_shares_reciprocal;
    int batch;
    int heads_q;  // query heads
    int len_q;
    int len_kv;
    int group;  // query heads of a key/value head
    int heads;  // of a sequence: row tiles * key/value heads, of which two count as one
    int key_tiles;  // of a head, at least 1
    int row_tiles;
    int head_sets;
    int tile_heads;  // of a row tile, with tile_queries queries each: see RowTiles
    int tile_queries;
    int blocks;  // thread blocks of the grid, no more than there are key tiles
    int aligned_shares;  // see own_share
    int share_distance;
    float scale_log2;  // softmax scale * log2(e), more than 0
    float ln2_hi;  // ln2_hi + ln2_lo: softmax scale / scale_log2, ln 2 but for the rounding of scale_log2
    float ln2_lo;
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

// ==== tile/common/packed_rows.cuh ====================================================================================

// PackGQA for groups of any size and few queries: rows of different query heads and queries that meet the same keys, so that these are
// read once.

// A row tile of a GQA group: `heads` query heads next to each other for each of `queries` queries. A group has several tiles, its sets of
// heads times its query tiles, where all of its rows would not fit. The last set and the last query tile may have rows that are not there.
struct RowTiles {
    int heads, queries;
    int head_sets, row_tiles;  // of a group: sets of heads, tiles
    u64 heads_reciprocal, head_sets_reciprocal, row_tiles_reciprocal;

    template <class Parameters>
    __device__ __forceinline__ static RowTiles of(const Parameters& p) {
        return {p.tile_heads,           p.tile_queries, p.head_sets, p.row_tiles, p.tile_heads_reciprocal, p.head_sets_reciprocal,
                p.row_tiles_reciprocal};
    }
    __device__ __forceinline__ int rows() const { return heads * queries; }
};

// One of them. `first_head` is a query head, of all.
struct PackedRows {
    int batch, head_kv, first_head, end_head, first_query;

    // `head` counts all row tiles of a sequence, those of a key/value head one after the other.
    __device__ __forceinline__ static PackedRows find(const RowTiles& tiles, int group, int batch, int head) {
        const int head_kv = divide(head, tiles.row_tiles_reciprocal), tile = head - head_kv * tiles.row_tiles;
        const int query_tile = divide(tile, tiles.head_sets_reciprocal), head_set = tile - query_tile * tiles.head_sets;
        return {batch, head_kv, head_kv * group + head_set * tiles.heads, head_kv * group + group, query_tile * tiles.queries};
    }
    __device__ __forceinline__ int query(const RowTiles& tiles, int row) const { return first_query + divide(row, tiles.heads_reciprocal); }
    __device__ __forceinline__ int head(const RowTiles& tiles, int row) const {
        return first_head + row - divide(row, tiles.heads_reciprocal) * tiles.heads;
    }
    // Whether there is such a row.
    __device__ __forceinline__ bool has(const RowTiles& tiles, int row, int len_q) const {
        return row < tiles.rows() && query(tiles, row) < len_q && head(tiles, row) < end_head;
    }
};

// ==== tile/common/key_shares.cuh =====================================================================================

// Equal shares of keys: which key tiles a thread block works on where few queries meet many keys, so that heads alone would not keep all
// SMs busy ("split-K": flash decoding).
//
// The key tiles of all heads are numbered: those of a head in all sequences, one sequence after the other, before those of the next head.
// Block b of P has the tiles [b * tiles / P, (b + 1) * tiles / P): one piece, which begins and ends anywhere in a head. What a block does
// of one head of a sequence is a part. The parts of a head lie in neighbouring blocks, in the order of its keys. Shares follow from sizes
// alone, so every run sums up in the same order.
//
// Where P is a multiple of the heads, all heads are cut at the same keys: shares P / heads apart begin at the same key of different heads.
// In general `aligned_shares` of them do, the greatest common divisor of both, `share_distance` apart. Blocks that start one after the
// other have these shares: they read the same keys of neighbouring heads at the same time, whose rows may lie side by side in memory.
// Everything but `own_share` counts blocks in the order of their shares.

// The key tiles of a head, [first, first + count) of all tiles. A head is what meets keys together: the query heads of a GQA group, or some
// of their rows. It has a tile even if it has no key, so that somebody writes its output.
struct HeadTiles {
    int batch, head;
    int first, count;

    __device__ __forceinline__ int end() const { return first + count; }
};

// Heads of sequences of one length. Another layout of sequences needs another struct with these functions.
struct DenseKeyTiles {
    int of_head, heads, sequences;                 // tiles of each head, heads of each sequence
    u64 of_head_reciprocal, sequences_reciprocal;  // see divide

    __device__ __forceinline__ int tiles() const { return of_head * heads * sequences; }
    // The head that a tile belongs to.
    __device__ __forceinline__ HeadTiles head_of(int tile) const {
        const int number = divide(tile, of_head_reciprocal), head = divide(number, sequences_reciprocal);
        return {number - head * sequences, head, number * of_head, of_head};
    }
};

// The number of this block's share.
template <class Parameters>
__device__ __forceinline__ int own_share(const Parameters& p) {
    const int round = divide(block_index(), p.aligned_shares_reciprocal);
    return (block_index() - round * p.aligned_shares) * p.share_distance + round;
}

// Where the parts of a head lie: in blocks from `first_block` on.
struct HeadParts {
    int first_block, count;
    bool begins_share;  // whether the first part is the first one of its block
};

// `blocks` * `blocks` is below 2^31. There are no more blocks than tiles, so each has some.
template <class KeyTiles>
struct KeyShares {
    KeyTiles key_tiles;
    int tiles, blocks;
    u64 blocks_reciprocal;    // see divide: a block must know its share before it can load anything
    int quotient, remainder;  // of tiles / blocks

    __device__ __forceinline__ KeyShares(const KeyTiles& key_tiles, int blocks, u64 blocks_reciprocal)
        : key_tiles(key_tiles),
          tiles(key_tiles.tiles()),
          blocks(blocks),
          blocks_reciprocal(blocks_reciprocal),
          quotient(divide(tiles, blocks_reciprocal)),
          remainder(tiles - quotient * blocks) {}

    // The first tile of a block, block * tiles / blocks without products of 64 bits.
    __device__ __forceinline__ int first_tile(int block) const {
        return block * quotient + divide(block * remainder, blocks_reciprocal);
    }
    // The block that has a tile: a guess, which rounding leaves at most a block or two away.
    __device__ __forceinline__ int block_of(int tile) const {
        int block = min(static_cast<int>(static_cast<float>(tile) / static_cast<float>(tiles) * static_cast<float>(blocks)), blocks - 1);
        while (first_tile(block) > tile) --block;
        while (first_tile(block + 1) <= tile) ++block;
        return block;
    }
    __device__ __forceinline__ HeadParts parts(const HeadTiles& head) const {
        const int first_block = block_of(head.first);
        return {first_block, block_of(head.end() - 1) - first_block + 1, first_tile(first_block) == head.first};
    }
};

// A block's way through the parts of its share.
template <class KeyTiles>
struct KeyPart {
    HeadTiles head;
    int begin, end;    // its tiles among all
    int end_of_share;
    bool is_first;     // of the block

    __device__ __forceinline__ KeyPart(const KeyShares<KeyTiles>& shares, int block)
        : begin(shares.first_tile(block)), end_of_share(shares.first_tile(block + 1)), is_first(true) {
        find_head(shares);
    }
    __device__ __forceinline__ bool exists() const { return begin < end_of_share; }
    __device__ __forceinline__ bool is_last() const { return end == end_of_share; }  // of the block
    // Whether it is all of its head: then nobody else has another part to add.
    __device__ __forceinline__ bool is_whole() const { return end - begin == head.count; }
    // The part's tiles within its head: the first one, and how many.
    __device__ __forceinline__ int first_in_head() const { return begin - head.first; }
    __device__ __forceinline__ int count() const { return end - begin; }

    __device__ __forceinline__ void advance(const KeyShares<KeyTiles>& shares) {
        begin = end;
        is_first = false;
        if (exists()) find_head(shares);
    }

  private:
    __device__ __forceinline__ void find_head(const KeyShares<KeyTiles>& shares) {
        head = shares.key_tiles.head_of(begin);
        end = min(head.end(), end_of_share);
    }
};

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

// ==== tile/common/partial_outputs.cuh ================================================================================

// Outputs of parts of a head, which meet some of its keys only, and how they become the head's output: each block that has a part writes it
// to memory, and whoever finds that all others have done so adds them up (in FlashAttention a second kernel does, "combine"). It
// adds from the first part to the last one, whatever the order in which they arrived, so results are the same to the bit in every run.

// Rows of O in fp32, not normalised, and with each its row sum and origin. A block has at most two parts that are not whole heads, the
// first and the last of its share, and a slot for each.
template <int kColumns>
struct PartialOutputs {
    static constexpr int kRowFloats = kColumns + 4;  // total, shift, row_max and one more, for an alignment of 16 bytes
    static_assert(kColumns % 4 == 0, "rows are read by 16 bytes");
    float* slots;
    int rows;  // of a slot

    __device__ __forceinline__ int slot_floats() const { return rows * kRowFloats; }
    __device__ __forceinline__ float* row(int slot, int row) const {
        return slots + (static_cast<i64>(slot) * rows + row) * kRowFloats;
    }
    __device__ __forceinline__ static int slot_of(int block, bool is_first) { return block * 2 + (is_first ? 0 : 1); }
    // The slot of a head's part, from 0 on. Only the first one may come behind others in its block.
    __device__ __forceinline__ static int slot_of_part(const HeadParts& parts, int part) {
        return slot_of(parts.first_block + part, part > 0 || parts.begins_share);
    }
    __device__ __forceinline__ static void store_statistics(float* row, float total, const Origin& origin) {
        *reinterpret_cast<uint4*>(row + kColumns) = {__float_as_uint(total), __float_as_uint(origin.shift),
                                                     __float_as_uint(origin.row_max), 0};
    }
};

// Of one origin above another one, in base 2. That of a row without keys is below all others, however low these are.
__device__ __forceinline__ float height_above(const Origin& a, const Origin& b, float scale_log2) {
    const bool has_keys[2] = {a.row_max != kInitialRowMax, b.row_max != kInitialRowMax};
    if (!has_keys[0] || !has_keys[1]) return has_keys[0] == has_keys[1] ? 0.0f : has_keys[0] ? infinity() : -infinity();
    return fmaf(a.shift - b.shift, scale_log2, a.row_max - b.row_max);
}

// Two sums of a row that are relative to different origins: the higher origin, and the factors that bring both sums to it.
struct CommonOrigin {
    Origin origin;
    float factors[2];

    __device__ __forceinline__ static CommonOrigin of(const Origin& a, const Origin& b, float scale_log2) {
        const float b_above_a = height_above(b, a, scale_log2);
        const float factor = ex2_approx_ftz(-fabsf(b_above_a));
        if (b_above_a > 0.0f) return {b, {factor, 1.0f}};
        return {a, {1.0f, factor}};
    }
    // What the sum of both is, corrected as in OnlineSoftmax.
    __device__ __forceinline__ float total(float a, float b) const { return a * corrected(0) + b * corrected(1); }

  private:
    __device__ __forceinline__ float corrected(int i) const { return fmaf(factors[i], kEx2Bias, factors[i]); }
};

// A row of all parts together: four neighbouring columns of O, not normalised.
struct MergedRow {
    float columns[4] = {};
    float total = 0.0f;
    Origin origin{0.0f, kInitialRowMax};

    __device__ __forceinline__ void add(const uint4& O, const uint4& statistics, float scale_log2) {
        const float own_total = __uint_as_float(statistics.x);
        const Origin own{__uint_as_float(statistics.y), __uint_as_float(statistics.z)};
        const CommonOrigin common = CommonOrigin::of(origin, own, scale_log2);
        const u32 given[4] = {O.x, O.y, O.z, O.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) columns[i] = columns[i] * common.factors[0] + __uint_as_float(given[i]) * common.factors[1];
        total = common.total(total, own_total);
        origin = common.origin;
    }
    // The same of `count` parts at a time, at most kParts, with their highest origin. Lane l of the warp has the statistics of part
    // l % kParts; all lanes have the same row, and `O` of all parts for their own columns, zeros where there is no part.
    template <int kParts>
    __device__ __forceinline__ void add(const uint4 (&O)[kParts], const uint4& statistics, int count, float scale_log2) {
        const bool exists = lane_index() % kParts < count;
        const Origin own{__uint_as_float(statistics.y), __uint_as_float(statistics.z)};
        Origin highest = exists ? own : origin;
#pragma unroll
        for (int distance = 1; distance < kParts; distance *= 2) {
            const Origin other{shfl_sync_bfly(highest.shift, distance), shfl_sync_bfly(highest.row_max, distance)};
            if (height_above(other, highest, scale_log2) > 0.0f) highest = other;
        }
        if (!(height_above(origin, highest, scale_log2) < 0.0f)) highest = origin;
        highest = {shfl_sync_idx(highest.shift, 0), shfl_sync_idx(highest.row_max, 0)};  // of equals one for all

        const float factor = exists ? ex2_approx_ftz(height_above(own, highest, scale_log2)) : 0.0f;
        float totals = exists ? __uint_as_float(statistics.x) * fmaf(factor, kEx2Bias, factor) : 0.0f;
#pragma unroll
        for (int distance = 1; distance < kParts; distance *= 2) totals += shfl_sync_bfly(totals, distance);
        const float before = ex2_approx_ftz(height_above(origin, highest, scale_log2));
        total = fmaf(total, fmaf(before, kEx2Bias, before), totals);
        origin = highest;
#pragma unroll
        for (int i = 0; i < 4; ++i) columns[i] *= before;
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
            const float by = shfl_sync_idx(factor, j);
            const u32 given[4] = {O[j].x, O[j].y, O[j].z, O[j].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) columns[i] = fmaf(__uint_as_float(given[i]), by, columns[i]);
        }
    }
};

// Counts a part that is in memory. One thread calls this, after a barrier of those that wrote the part. True where it is the last one of
// its head: the caller's threads then merge, after another barrier. The counter, that of the head's first block, is 0 before and after: no
// other head has its first, but not its last part there.
__device__ __forceinline__ bool is_last_part(u32* counter, const HeadParts& parts) {
    if (atom_add_acq_rel_gpu(counter, 1) != static_cast<u32>(parts.count - 1)) return false;
    *counter = 0;  // nobody else looks at it before the launch has ended
    return true;
}

// A warp adds up a row of a head's parts, four columns a lane from `first_column` on, and calls store(row, column, MergedRow). kParts of
// them are on their way from memory at a time: their latency is most of what merging costs, and a warp's instructions one by one are the
// rest.
template <int kParts, int kColumns, class Store>
__device__ __forceinline__ void merge_row(const PartialOutputs<kColumns>& partials, const HeadParts& parts, int row, int first_column,
                                          float scale_log2, const Store& store) {
    const int lane = lane_index(), column = min(first_column + lane * 4, kColumns - 4);
    const auto part_at = [&](int part) { return partials.row(PartialOutputs<kColumns>::slot_of_part(parts, part), row); };
    MergedRow merged;
#pragma unroll 1
    for (int first = 0; first < parts.count; first += kParts) {
        const uint4 statistics = *reinterpret_cast<const uint4*>(part_at(min(first + lane % kParts, parts.count - 1)) + kColumns);
        uint4 O[kParts] = {};
        O[0] = *reinterpret_cast<const uint4*>(part_at(first) + column);
        // From the second one on they are two slots apart. One multiplication and addition is all that each address takes.
        const char* from = reinterpret_cast<const char*>(part_at(first + 1) + column);
        u32 distance = 2 * sizeof(float) * partials.slot_floats();
        launder(distance);  // else its multiples, which never change, would occupy registers all the time
#pragma unroll
        for (int j = 1; j < kParts; ++j)
            if (first + j < parts.count) O[j] = *reinterpret_cast<const uint4*>(from + u64{distance} * (j - 1));
        merged.add(O, statistics, parts.count - first, scale_log2);
    }
    if (first_column + lane * 4 < kColumns) store(row, column, merged);
}

// Adds up the rows [first_row, end_row) of a head's parts, by so many `warps`, of which this one is `warp`.
template <int kColumns, class Store>
__device__ __forceinline__ void merge_rows(const PartialOutputs<kColumns>& partials, const HeadParts& parts, int first_row, int end_row,
                                           int warp, int warps, float scale_log2, const Store& store) {
    constexpr int kPieces = (kColumns + 127) / 128;    // of a row, as many columns each as a warp adds up
    constexpr int kAtOnce = kColumns > 128 ? 8 : 16;  // parts, where a thread has registers for them beside its kernel's accumulators
#pragma unroll 1
    for (int i = first_row * kPieces + warp; i < end_row * kPieces; i += warps) {
        const int row = i / kPieces, column = i % kPieces * 128;
        if (parts.count <= 4) merge_row<4>(partials, parts, row, column, scale_log2, store);
        else merge_row<kAtOnce>(partials, parts, row, column, scale_log2, store);
    }
}

// The same by kThreads threads, whole warps, of which this one is `thread`.
template <int kThreads, int kColumns, class Store>
__device__ __forceinline__ void merge_parts(const PartialOutputs<kColumns>& partials, const HeadParts& parts, int first_row, int end_row,
                                            int thread, float scale_log2, const Store& store) {
    merge_rows(partials, parts, first_row, end_row, shfl_sync_first(thread / 32), kThreads / 32, scale_log2, store);
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
__device__ __forceinline__ float sum_limit() { return 0x1p12f; }

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
    bool updates_every_block;  // each later K block of this work tile updates the row max
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
        updates_every_block = huge = false;
    }

    // If the maximum of S exceeds the row max by more than kHeadroom in some row of the warp, every row whose maximum is higher than its
    // row max takes it. In a warp with a huge row this needs no headroom, and each row's shift is subtracted from S, too: so call it only
    // once for each S.
    template <int kKeyTiles>
    __device__ __forceinline__ void update_row_max(float (&S)[kKeyTiles][4]) {
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
                const float next = fmaxf(row_max[h], maximum_log2[h]);
                rescale_sum(h, ex2_approx_ftz(row_max[h] - next));
                row_max[h] = next;
            }
        }
    }
    template <int kKeyTiles>
    __device__ __forceinline__ void update_huge_row_max(float (&S)[kKeyTiles][4], const float (&maximum)[2]) {
        // Every later block must come here, too, since S loses the shift here. A row that does not move has a factor of 1.
        needs_rescale = updates_every_block = true;
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
        bool updates_row_max = !kStaleRowMax || new_rows || updates_every_block;
        needs_rescale = false;
        float partial[2][2];
#pragma unroll 1
        for (;;) {  // a loop, so that the code of the exponentials is there once
            if (updates_row_max) update_row_max(S);
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
            updates_row_max = updates_every_block = true;
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

// ==== tile/warpgroup/decode_storage.cuh ==============================================================================

// What the roles of the decode kernel share: a block's way through its keys, and its shared memory.

// The block's share of all key tiles, and a part of it. A head, to these, is a row tile of a key/value head: see PackedRows.
template <class Traits>
using Shares = KeyShares<typename Traits::KeyTiles>;
template <class Traits>
using Part = KeyPart<typename Traits::KeyTiles>;

template <class Traits, class Parameters>
__device__ __forceinline__ Shares<Traits> key_shares(const Parameters& p) {
    return {{p.key_tiles, p.heads, p.batch, p.key_tiles_reciprocal, p.batch_reciprocal}, p.blocks, p.blocks_reciprocal};
}

// The rows that meet a key/value head of those whose tiles lie side by side in a stage.
template <class Traits, class Parameters>
__device__ __forceinline__ PackedRows rows_of(const Parameters& p, const HeadTiles& head, int tile_head = 0) {
    constexpr int kSideBySide = Traits::kKeyHeads;
    PackedRows rows = PackedRows::find(RowTiles::of(p), p.group * kSideBySide, head.batch, head.head);
    if constexpr (kSideBySide > 1) {
        rows.head_kv = rows.head_kv * kSideBySide + tile_head;
        rows.first_head += tile_head * p.group;
        rows.end_head = min(rows.head_kv * p.group + p.group, p.heads_q);  // the last head may have no neighbour
    }
    return rows;
}

// Shared memory: the rows of Q, stages of K and V of kKeyHeads neighbouring heads each, and what the second group of consumers hands to the
// first one.
template <class Traits>
struct DecodeStorage {
    using QueryTile = typename Traits::QueryTile;
    using KeyTile = typename Traits::KeyTile;
    using ValueTile = typename Traits::ValueTile;
    static constexpr int kQueryStages = Traits::kQueryStages, kStages = Traits::kStages;
    static constexpr int kKeyBytes = Traits::kKeyHeads * KeyTile::kBytes, kStageBytes = kKeyBytes + Traits::kKeyHeads * ValueTile::kBytes;
    // Column tiles of O that are handed over at a time: 16 bytes of each for every thread.
    static constexpr int kHandedTiles = Traits::kColumnsV / 8 < 16 ? Traits::kColumnsV / 8 : 16;
    static constexpr int kHandedBytes = Traits::kKeyGroups > 1 ? kHandedTiles * 128 * 16 : 0;
    static constexpr int kPartsBytes = Traits::kSharers * 2 * 16;
    static constexpr int kStatisticsBytes = Traits::kKeyGroups > 1 ? 64 * 8 : 0;

    SharedAddress q_tiles, stages, handed, statistics;
    Pipeline<kQueryStages> q_pipeline;
    Pipeline<kStages> pipeline;
    SharedAddress parts;  // for each sharer and its first and its last part: HeadParts, and whether it has written the last of them

    // All threads call this: each computes the addresses.
    __device__ __forceinline__ explicit DecodeStorage(SharedRegions& regions) {
        q_tiles = regions.take(kQueryStages * Traits::kKeyHeads * QueryTile::kBytes);
        stages = regions.take(kStages * kStageBytes);
        handed = regions.take(kHandedBytes);
        statistics = regions.take(kStatisticsBytes);
        q_pipeline.barriers = regions.take(Pipeline<kQueryStages>::kBytes);
        pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
        parts = regions.take(kPartsBytes);
    }
    // All threads call this, too; what it does is there after the next barrier. The consumers zero the rows that Q does not have, which no
    // copy writes: the producers, for whom all wait, have nothing to do here.
    template <int kThreads>
    __device__ __forceinline__ void initialise(int q_rows) const {
        const int thread = thread_index() - 128;  // of the consumers
        if (thread < 0) return;
        if (thread == 0) {
            // Each warp releases Q: a consumer may have no tile of a part, and then nothing else keeps its warps together, of which one
            // that still waits for Q would miss its phase. One thread releases K and V, as products keep a consumer's warps together.
            q_pipeline.initialise(1, Traits::kConsumers * 4);
            pipeline.initialise(1, Traits::kSharers);
            fence_mbarrier_init();
        }
        for (int panel = 0; panel < kQueryStages * Traits::kKeyHeads * QueryTile::kPanels; ++panel)
            for (int i = q_rows * 8 + thread; i < Traits::kRows * 8; i += kThreads - 128)
                store_shared_v4(q_tiles + panel * QueryTile::kPanelBytes + i * 16, {0, 0, 0, 0});
        fence_proxy_async();
    }
    // Of the stage's key/value head `head`, as the next two.
    __device__ __forceinline__ QueryTile q_tile(u32 stage, int head) const {
        return {q_tiles + (stage * Traits::kKeyHeads + head) * QueryTile::kBytes};
    }
    __device__ __forceinline__ KeyTile key_tile(u32 stage, int head) const {
        return {stages + stage * kStageBytes + head * KeyTile::kBytes};
    }
    __device__ __forceinline__ ValueTile value_tile(u32 stage, int head) const {
        return {stages + stage * kStageBytes + kKeyBytes + head * ValueTile::kBytes};
    }
};

// ==== tile/warpgroup/decode_producer.cuh =============================================================================

// The producers of the decode kernel, a thread each: one keeps the stages of K and V on their way, the other one loads Q.

// As PanelTile::load. The L2 gives up these bytes before those that the next launch has prefetched: see prefetch_keys. With a cache nothing
// is prefetched, and sequences may share pages.
template <class Tile>
__device__ __forceinline__ void load_evict_first(const Tile& tile, const TensorMap& map, SharedAddress barrier, int row, int head,
                                                 int batch) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel)
        cp_async_bulk_tensor_load_evict_first(tile.base + panel * Tile::kPanelBytes, map, barrier, panel * 64, row, head, batch);
}

// K and V of all key tiles of this block, from the first to the last, given its first part. Keys past the last one become zeros.
template <class Traits, class Parameters>
__device__ __forceinline__ void produce_keys(const Parameters& p, const DecodeStorage<Traits>& smem, const Shares<Traits>& shares,
                                             Part<Traits> part) {
    PipelineState<Traits::kStages> state;
#pragma unroll 1
    for (; part.exists(); part.advance(shares)) {
        const int head = rows_of<Traits>(p, part.head).head_kv, batch = part.head.batch, end = part.first_in_head() + part.count();
#pragma unroll 1
        for (int tile = part.first_in_head(); tile < end; ++tile) {
            smem.pipeline.producer_acquire(state);
            smem.pipeline.producer_expect(state, DecodeStorage<Traits>::kStageBytes);
            const SharedAddress full = smem.pipeline.full(state.stage);
#pragma unroll
            for (int i = 0; i < Traits::kKeyHeads; ++i)
                load_evict_first(smem.key_tile(state.stage, i), p.k_map, full, tile * Traits::kBlockKv, head + i, batch);
#pragma unroll
            for (int i = 0; i < Traits::kKeyHeads; ++i)
                load_evict_first(smem.value_tile(state.stage, i), p.v_map, full, tile * Traits::kBlockKv, head + i, batch);
            state.advance();
        }
    }
}

// Has the L2 fetch the first tiles of K and V while the launch before ends, which leaves the memory idle. That launch may still write
// these keys: copies come after it, and find in the L2 what it wrote. All warps call this, and have a box each, or a few, as all have to
// meet at the next barrier.
template <class Traits, class Parameters>
__device__ __forceinline__ void prefetch_keys(const Parameters& p, const Part<Traits>& part) {
    constexpr int kSideBySide = Traits::kKeyHeads, kPanels = Traits::KeyTile::kPanels;
    constexpr int kBoxes = kSideBySide * (kPanels + Traits::ValueTile::kPanels);
    constexpr int kWarps = (Traits::kConsumers + 1) * 4;
    // More than an SM needs on their way; but what all SMs fetch must stay in the L2 until it is copied.
    constexpr int kPrefetchedBytes = 131072, kTiles = kPrefetchedBytes / DecodeStorage<Traits>::kStageBytes;
    const PackedRows rows = rows_of<Traits>(p, part.head);
    const int begin = part.first_in_head();
    const int boxes = min(part.count(), kTiles > 0 ? kTiles : 1) * kBoxes, warp = warp_index();
    if (lane_index() != 0) return;
#pragma unroll 1
    for (int i = warp; i < boxes; i += kWarps) {
        const int row = (begin + i / kBoxes) * Traits::kBlockKv, box = i % kBoxes;
        const int head = rows.head_kv + box % kSideBySide, panel = box / kSideBySide;
        if (panel < kPanels) cp_async_bulk_prefetch_tensor(p.k_map, panel * 64, row, head, part.head.batch);
        else cp_async_bulk_prefetch_tensor(p.v_map, (panel - kPanels) * 64, row, head, part.head.batch);
    }
}

// Q of each part. A thread of its own, because Q of the next part must wait until the consumers have done with that of this one, and the
// keys must not wait with it.
template <class Traits, class Parameters>
__device__ __forceinline__ void produce_queries(const Parameters& p, const DecodeStorage<Traits>& smem, const Shares<Traits>& shares,
                                                Part<Traits> part) {
    PipelineState<Traits::kQueryStages> state;
#pragma unroll 1
    for (; part.exists(); part.advance(shares)) {
        const PackedRows rows = rows_of<Traits>(p, part.head);
        smem.q_pipeline.producer_acquire(state);
        smem.q_pipeline.producer_expect(state, Traits::kKeyHeads * RowTiles::of(p).rows() * Traits::QueryTile::kPanels * 128);
#pragma unroll
        for (int i = 0; i < Traits::kKeyHeads; ++i) {
            const int first_head = rows.first_head + i * p.group;
            smem.q_tile(state.stage, i).load(p.q_map, smem.q_pipeline.full(state.stage), first_head, rows.first_query, rows.batch);
        }
        state.advance();
    }
}

// ==== tile/warpgroup/decode_exchange.cuh =============================================================================

// How two key groups of the decode kernel bring their parts of a head together: by way of shared memory the first one adds what the second
// one has, O in the order of registers, so many column tiles at a time, and the statistics.

template <class Traits>
struct KeyGroupExchange {
    using Storage = DecodeStorage<Traits>;
    static constexpr int kFilled = 1, kEmptied = 2, kPair = 2 * 128;  // barriers: the second key group has written; the first one has read
    static constexpr int kOutTiles = Traits::kColumnsV / 8;

    const Storage& smem;
    const bool has_rows;  // whether this warp has any

    // The first key group calls this before its first part: nothing is there that it has not read.
    __device__ __forceinline__ static void begin() { bar_arrive(kEmptied, kPair); }

    __device__ __forceinline__ void store(const float (&O)[kOutTiles][4], const PairStatistics& own) const {
#pragma unroll
        for (int first = 0; first < kOutTiles; first += Storage::kHandedTiles) {
            bar_sync(kEmptied, kPair);
            if (first == 0) own.store(smem.statistics);
            if (has_rows) {
#pragma unroll
                for (int j = first; j < min(first + Storage::kHandedTiles, kOutTiles); ++j)
                    store_shared_v4(handed(j - first), {__float_as_uint(O[j][0]), __float_as_uint(O[j][1]), __float_as_uint(O[j][2]),
                                                        __float_as_uint(O[j][3])});
            }
            bar_arrive(kFilled, kPair);
        }
    }
    __device__ __forceinline__ void add(float (&O)[kOutTiles][4], float (&totals)[2], Origin (&origins)[2], float scale_log2) const {
        float factors[2][2];
#pragma unroll
        for (int first = 0; first < kOutTiles; first += Storage::kHandedTiles) {
            bar_sync(kFilled, kPair);
            if (first == 0) {
                const uint4 v = load_shared_v4(smem.statistics + (thread_index() / 32 % 4 * 8 + lane_index() / 4) * 16);
                const RowStatistics other[2] = {{__uint_as_float(v.x), __uint_as_float(v.y)}, {__uint_as_float(v.z), __uint_as_float(v.w)}};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const CommonOrigin common = CommonOrigin::of(origins[h], other[h].origin(), scale_log2);
                    totals[h] = common.total(totals[h], fabsf(other[h].total));
                    origins[h] = common.origin;
                    factors[h][0] = common.factors[0], factors[h][1] = common.factors[1];
                }
            }
            if (has_rows) {
#pragma unroll
                for (int j = first; j < min(first + Storage::kHandedTiles, kOutTiles); ++j) {
                    const uint4 v = load_shared_v4(handed(j - first));
                    const u32 given[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int e = 0; e < 4; ++e) O[j][e] = O[j][e] * factors[e / 2][0] + __uint_as_float(given[e]) * factors[e / 2][1];
                }
            }
            bar_arrive(kEmptied, kPair);
        }
    }

  private:
    __device__ __forceinline__ SharedAddress handed(int tile) const { return smem.handed + (tile * 128 + thread_index() % 128) * 16; }
};

// ==== tile/warpgroup/decode_epilogue.cuh =============================================================================

// The epilogue of a consumer of the decode kernel: from its registers to the output, if its part is a whole head; else to the partial
// outputs, which whoever comes last adds up.

// The row of the tile that is a thread's first one (h 0) or second one (h 1) in the products' accumulators.
__device__ __forceinline__ int own_row(int row_group, int h) {
    return row_group * 64 + thread_index() / 32 % 4 * 16 + lane_index() / 4 + h * 8;
}

template <class Traits, class Parameters>
struct DecodeEpilogue {
    using Element = typename Traits::Element;
    using Partials = PartialOutputs<Traits::kHeadDimV>;
    // Barriers of each sharer, and one of both key groups.
    static constexpr int kFirstBarrier = 3, kBothGroups = 5, kOutTiles = Traits::kHeadDimV / 8;

    const Parameters& p;
    const DecodeStorage<Traits>& smem;
    const PackedRows& rows;
    const RowTiles& tiles;
    const int sharer, tile_head, row_group;  // see DecodeConsumer

    template <int kTiles>
    __device__ __forceinline__ void store_rows(const float (&O)[kTiles][4], const float (&totals)[2], const Origin (&origins)[2],
                                               const float (&normalisers)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = own_row(row_group, h);
            if (!rows.has(tiles, row, p.len_q)) continue;
            const int query = rows.query(tiles, row), head = rows.head(tiles, row);
            u32* out = reinterpret_cast<u32*>(out_row(query, head)) + lane_index() % 4;
#pragma unroll
            for (int j = 0; j < kOutTiles; ++j)
                out[j * 4] = cvt_rn_x2<Element>(O[j][h * 2] * normalisers[h], O[j][h * 2 + 1] * normalisers[h]);
            if (lane_index() % 4 == 0) store_lse(query, head, origins[h], totals[h]);
        }
    }
    // One thread of a sharer looks up where the other parts of a head are, while its keys are on their way.
    __device__ __forceinline__ void find_parts(const Shares<Traits>& shares, const HeadTiles& head, bool is_first) const {
        const HeadParts parts = shares.parts(head);
        store_shared_v4(parts_at(is_first), {static_cast<u32>(parts.first_block), static_cast<u32>(parts.count), parts.begins_share, 0});
    }
    // `is_first`: whether it is the block's first part.
    template <int kTiles>
    __device__ __forceinline__ void store_partial_rows(const float (&O)[kTiles][4], const float (&totals)[2], const Origin (&origins)[2],
                                                       bool is_first) const {
        const Partials partials{p.partials, rows_of_slot()};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = own_row(row_group, h);
            if (row >= tiles.rows()) continue;
            float* to = partials.row(Partials::slot_of(own_share(p), is_first), first_row_of_slot() + row);
#pragma unroll
            for (int j = 0; j < kOutTiles; ++j) {
                float* pair = to + j * 8 + lane_index() % 4 * 2;
                pair[0] = O[j][h * 2], pair[1] = O[j][h * 2 + 1];
            }
            if (lane_index() % 4 == 0) Partials::store_statistics(to, totals[h], origins[h]);
        }
        bar_sync(kFirstBarrier + sharer, 128);
        if (thread_index() % 128 == 0) {
            const HeadParts parts = load_parts(is_first);
            const bool is_last = is_last_part(p.part_counters + parts.first_block * Traits::kSharers + sharer, parts);
            store_shared(parts_at(is_first) + 12, is_last);
        }
    }
    // Adds the parts up, if they are all there: by so many key groups, of which this is one.
    __device__ __forceinline__ void merge_if_last(int key_group, int key_groups, bool is_first) const {
        bar_sync(key_groups > 1 ? kBothGroups : kFirstBarrier + sharer, key_groups * 128);
        if (load_shared(parts_at(is_first) + 12) == 0) return;
        const HeadParts parts = load_parts(is_first);
        const int before = first_row_of_slot();
        const int first_row = before + row_group * 64, end_row = min(first_row + 64, before + tiles.rows());
        const Partials partials{p.partials, rows_of_slot()};
        const auto store = [&](int row_of_slot, int column, const MergedRow& merged) {
            const int row = row_of_slot - before;
            if (!rows.has(tiles, row, p.len_q)) return;
            const int query = rows.query(tiles, row), head = rows.head(tiles, row);
            const float by = normaliser(merged.total);
            u32* out = reinterpret_cast<u32*>(out_row(query, head) + column);
            out[0] = cvt_rn_x2<Element>(merged.columns[0] * by, merged.columns[1] * by);
            out[1] = cvt_rn_x2<Element>(merged.columns[2] * by, merged.columns[3] * by);
            if (column == 0) store_lse(query, head, merged.origin, merged.total);
        };
        if constexpr (Traits::kKeyGroups == 1)
            merge_parts<128>(partials, parts, first_row, end_row, thread_index() % 128, p.scale_log2, store);
        else
            merge_rows(partials, parts, first_row, end_row, key_group * 4 + warp_index() % 4, key_groups * 4, p.scale_log2, store);
    }

  private:
    // A slot has the rows of all of a stage's heads.
    __device__ __forceinline__ int rows_of_slot() const { return Traits::kKeyHeads * tiles.rows(); }
    __device__ __forceinline__ int first_row_of_slot() const { return tile_head * tiles.rows(); }
    __device__ __forceinline__ SharedAddress parts_at(bool is_first) const {
        return smem.parts + (sharer * 2 + (is_first ? 0 : 1)) * 16;
    }
    __device__ __forceinline__ HeadParts load_parts(bool is_first) const {
        const uint4 v = load_shared_v4(parts_at(is_first));
        return {static_cast<int>(v.x), static_cast<int>(v.y), v.z != 0};
    }
    __device__ __forceinline__ Element* out_row(int query, int head) const {
        return p.out + rows.batch * p.out_batch + head * p.out_head + query * p.out_row;
    }
    __device__ __forceinline__ void store_lse(int query, int head, const Origin& origin, float total) const {
        if (p.lse == nullptr) return;
        p.lse[(static_cast<i64>(rows.batch) * p.heads_q + head) * p.len_q + query] =
            log_sum_exp(origin, total, p.scale_log2, p.ln2_hi, p.ln2_lo);
    }
};

// ==== tile/warpgroup/decode_consumer.cuh =============================================================================

// A consumer of the decode kernel: one warpgroup, its 64 rows, and of its block's key tiles all or every other one. S, P and O stay in
// registers.

// One of kSharers * kKeyGroups consumers. Sharers work on a tile together: each has rows of its own, or a key/value head of its own with
// the rows that meet it. Those of the first key group write what comes out; with a second one they add its part first.
template <class Traits, class Parameters>
struct DecodeConsumer {
    using Element = typename Traits::Element;
    using Storage = DecodeStorage<Traits>;
    using Exchange = KeyGroupExchange<Traits>;
    using Chain = decltype(Traits::make_chain(Parameters{}));
    static constexpr int kBlockKv = Traits::kBlockKv, kKeyGroups = Traits::kKeyGroups, kOutTiles = Traits::kColumnsV / 8;
    // Whether P V of a tile runs beside the softmax of the next one: two sharers begin a tile together, and nothing else would.
    static constexpr bool kPipelined = Traits::kSharers > 1;
    static_assert(Traits::kStages % kKeyGroups == 0, "a stage is always of the same key group: parities of two would not tell its phases");

    const Parameters& p;
    const Storage& smem;
    const int sharer, key_group;
    const int tile_head, row_group;  // of the stage's key/value heads, and of the rows that meet it
    const RowTiles tiles;
    const Chain chain;
    const Shares<Traits>& shares;
    const bool has_rows;  // whether this warp has any: else it computes nothing but the products, which need all warps
    PipelineState<Traits::kQueryStages> q_state;
    PipelineState<Traits::kStages / kKeyGroups> state;  // of the own stages
    OnlineSoftmax<Element, true> softmax;
    float S[kBlockKv / 8][4];
    float O[kOutTiles][4];
    int ends_of_keys[2];  // that the thread's two rows see
    int first_masked;     // key tile: those before it are seen whole by every row

    __device__ __forceinline__ DecodeConsumer(const Parameters& p, const Storage& smem, const Shares<Traits>& shares, int consumer)
        : p(p),
          smem(smem),
          sharer(consumer / kKeyGroups),
          key_group(consumer % kKeyGroups),
          tile_head(sharer / Traits::kRowGroups),
          row_group(sharer % Traits::kRowGroups),
          tiles(RowTiles::of(p)),
          chain(Traits::make_chain(p)),
          shares(shares),
          has_rows(shfl_sync_first(own_row(row_group, 0)) < tiles.rows()),
          softmax(p.scale_log2, p.ln2_hi) {}

    __device__ __forceinline__ void run(Part<Traits> part) {
        if (kKeyGroups > 1 && key_group == 0) Exchange::begin();
        int turn = 0;  // of the key groups
#pragma unroll 1
        for (; part.exists(); part.advance(shares)) {
            begin_part(part);
            const int first = part.first_in_head(), end = first + part.count();
            smem.q_pipeline.consumer_wait(q_state);
            if constexpr (kPipelined) {
                work_on_all(first, end);
            } else {
                bool new_rows = true;
#pragma unroll 1
                for (int tile = first; tile < end; ++tile) {
                    const bool own = kKeyGroups == 1 || turn == key_group;
                    turn = (turn + 1) % kKeyGroups;
                    if (!own) continue;
                    work_on(tile, new_rows);
                    new_rows = false;
                }
            }
            barrier_warp_sync();
            smem.q_pipeline.consumer_release(q_state.stage, lane_index() == 0);
            q_state.advance();
            finish_part(part);
        }
    }

    // ---- a part of a head ----

    __device__ __forceinline__ void begin_part(const Part<Traits>& part) {
        const PackedRows rows = rows_of<Traits>(p, part.head, tile_head);
        first_masked = max(0, chain.keys(rows.first_query).end) / kBlockKv;
        if (!part.is_whole() && key_group == 0 && thread_index() % 128 == 0)
            epilogue(rows).find_parts(shares, part.head, part.is_first);
#pragma unroll
        for (int h = 0; h < 2; ++h) ends_of_keys[h] = chain.keys(rows.query(tiles, own_row(row_group, h))).end;
#pragma unroll
        for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) O[j][e] = 0.0f;
        softmax.restart();
    }

    // FlashAttention-2, algorithm 1, lines 8 to 10, for one key tile. While one key group works the other one's products run.
    __device__ __forceinline__ void work_on(int tile, bool new_rows) {
        u32 P[kBlockKv / 16][4] = {};
        issue_qk(tile);
        wgmma_wait_group<0>();
        make_p(P, tile, new_rows);
        rescale();
        drain(P);
    }
    // The same for all tiles of a part, where P V of the tile before runs beside the softmax.
    __device__ __forceinline__ void work_on_all(int first, int end) {
        if (first >= end) return;
        u32 P[2][kBlockKv / 16][4] = {};
        issue_qk(first);
        wgmma_wait_group<0>();
        make_p(P[0], first, true);
#pragma unroll 1
        for (;;) {
            if (++first == end) return drain(P[0]);
            iterate(P[0], P[1], first);
            if (++first == end) return drain(P[1]);
            iterate(P[1], P[0], first);
        }
    }
    __device__ __forceinline__ void iterate(u32 (&P)[kBlockKv / 16][4], u32 (&P_next)[kBlockKv / 16][4], int tile) {
        const u32 stage = own_stage();
        state.advance();
        launder(O);
        launder(P);
        issue_qk(tile);
        issue_pv(P, stage);
        wgmma_wait_group<1>();
        make_p(P_next, tile, false);
        retire_pv(stage);
        rescale();
    }
    __device__ __forceinline__ void drain(u32 (&P)[kBlockKv / 16][4]) {
        launder(O);
        launder(P);
        issue_pv(P, own_stage());
        retire_pv(own_stage());
        state.advance();
    }
    __device__ __forceinline__ u32 own_stage() const { return state.stage * kKeyGroups + key_group; }
    __device__ __forceinline__ void issue_qk(int tile) {
        const u32 stage = own_stage();
        wait(smem.pipeline.full(stage), state.parity);
        wgmma_fence();
        gemm_scores<Element, Traits::kColumns>(S, smem.q_tile(q_state.stage, tile_head), row_group * 64, smem.key_tile(stage, tile_head));
        wgmma_commit_group();
    }
    // Once S is there.
    __device__ __forceinline__ void make_p(u32 (&P)[kBlockKv / 16][4], int tile, bool new_rows) {
        launder(S);
        if (!has_rows) return;
        const bool masked = tile >= first_masked;
        if (masked) mask(tile);
        softmax.exp2_and_sum(P, S, new_rows || masked);
    }
    __device__ __forceinline__ void rescale() {
        if (has_rows && softmax.needs_rescale) softmax.rescale(O);
    }
    // O and P must have been laundered, before S where its product is under way.
    __device__ __forceinline__ void issue_pv(const u32 (&P)[kBlockKv / 16][4], u32 stage) {
        wgmma_fence();
        gemm_output<Element>(O, P, smem.value_tile(stage, tile_head));
        wgmma_commit_group();
    }
    __device__ __forceinline__ void retire_pv(u32 stage) {
        wgmma_wait_group<0>();
        launder(O);
        smem.pipeline.consumer_release(stage, thread_index() % 128 == 0);
    }
    __device__ __forceinline__ void mask(int tile) {
#pragma unroll
        for (int j = 0; j < kBlockKv / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (tile * kBlockKv + j * 8 + lane_index() % 4 * 2 + e % 2 >= ends_of_keys[e / 2]) S[j][e] = -infinity();
    }

    // ---- what comes of it ----

    __device__ __forceinline__ DecodeEpilogue<Traits, Parameters> epilogue(const PackedRows& rows) const {
        return {p, smem, rows, tiles, sharer, tile_head, row_group};
    }

    __device__ __forceinline__ void finish_part(const Part<Traits>& part) {
        const PackedRows rows = rows_of<Traits>(p, part.head, tile_head);  // once more: nothing of it is needed between begin and end
        const auto epilogue = this->epilogue(rows);
        // The second key group has nothing else to do once the block's last part is there: then it helps to add up.
        const bool helps = kKeyGroups > 1 && part.is_last();
        float normalisers[2];
        const PairStatistics own = softmax.finish(normalisers);
        if (kKeyGroups > 1 && key_group > 0) {
            Exchange{smem, has_rows}.store(O, own);
            if (!helps || part.is_whole()) return;
        } else {
            float totals[2] = {fabsf(own.rows[0].total), fabsf(own.rows[1].total)};
            Origin origins[2] = {own.rows[0].origin(), own.rows[1].origin()};
            if constexpr (kKeyGroups > 1) {
                Exchange{smem, has_rows}.add(O, totals, origins, p.scale_log2);
                normalisers[0] = normaliser(totals[0]), normalisers[1] = normaliser(totals[1]);
            }
            if (part.is_whole()) return epilogue.store_rows(O, totals, origins, normalisers);
            epilogue.store_partial_rows(O, totals, origins, part.is_first);
        }
        epilogue.merge_if_last(key_group, helps ? 2 : 1, part.is_first);
    }
};

// ---- the kernel -------------------------------------------------------------------------------------------------------

struct Traits {
    using Element = ::Element;
    static constexpr int kHeadDim = 64, kHeadDimV = 64;
    static constexpr bool kCausal = true;

    // Consumers: for each key/value head of a stage and 64 rows that meet it, and as many that take key tiles in turn.
    static constexpr int kKeyHeads = 2, kRowGroups = 1, kSharers = kKeyHeads * kRowGroups;
    static constexpr int kKeyGroups = 1, kConsumers = kSharers * kKeyGroups;
    // Stages of K and V, and of Q.
    static constexpr int kBlockKv = 64, kStages = 4, kQueryStages = 1;

    // A product contracts 16 columns of Q and K, or 16 keys, at a time.
    static constexpr int kRows = kRowGroups * 64, kColumns = (kHeadDim + 15) / 16 * 16, kColumnsV = (kHeadDimV + 15) / 16 * 16;
    using QueryTile = PanelTile<kRows, kColumns>;
    using KeyTile = PanelTile<kBlockKv, kColumns>;
    using ValueTile = PanelTile<kBlockKv, kColumnsV>;

    using KeyTiles = DenseKeyTiles;

    __device__ __forceinline__ static auto make_chain(const Parameters& p) { return ::make_chain<kCausal>(p.len_q, p.len_kv); }
};

constexpr int kThreads = (Traits::kConsumers + 1) * 128, kBlocksPerSm = 1;
// Of a thread, once setmaxnreg has moved some.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr bool kMovesRegisters = kProducerRegisters != kConsumerRegisters;
static_assert(kProducerRegisters + Traits::kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (Traits::kConsumers + 1),
              "setmaxnreg cannot hand out more than a block has");

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
attention_decode_sm90_bf16_d64_causal_rg1_kg1_bk64_s4_h2_sm_90a(const __grid_constant__ Parameters p) {
    SharedRegions regions;
    const DecodeStorage<Traits> smem(regions);
    if (thread_index() == 0) {
        prefetch_tensormap(p.k_map);
        prefetch_tensormap(p.v_map);
        prefetch_tensormap(p.q_map);
    }
    smem.initialise<kThreads>(RowTiles::of(p).rows());
    const auto shares = key_shares<Traits>(p);
    const Part<Traits> first_part(shares, own_share(p));
    prefetch_keys<Traits>(p, first_part);
    griddepcontrol_wait();  // before any thread reads or writes what launches before have written or read
    barrier_sync();
    const int warpgroup = warp_index() / 4;
    if (warpgroup == 0) {
        if constexpr (kMovesRegisters) setmaxnreg_dec<kProducerRegisters>();
        if (thread_index() == 0) {
            produce_keys(p, smem, shares, first_part);
            griddepcontrol_launch_dependents();  // once all copies are on their way: the next launch takes SMs as they come free
        }
        if (thread_index() == 32) produce_queries(p, smem, shares, first_part);
    } else {
        if constexpr (kMovesRegisters) setmaxnreg_inc<kConsumerRegisters>();
        DecodeConsumer<Traits, Parameters>(p, smem, shares, warpgroup - 1).run(first_part);
    }
}
