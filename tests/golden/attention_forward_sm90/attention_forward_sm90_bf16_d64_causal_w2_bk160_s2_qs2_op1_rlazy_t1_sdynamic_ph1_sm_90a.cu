// attention_forward_sm90_bf16_d64_causal_w2_bk160_s2_qs2_op1_rlazy_t1_sdynamic_ph1_sm_90a
//
// Attention forward for Hopper, in the manner of FlashAttention-3 (Shah et al. 2024): out = softmax(scale * Q K^T + causal mask) V,
// lse = log(sum(exp(scale * Q K^T))) for each row. One thread of the first warpgroup, the producer, loads tiles by tensor copies;
// 2 warpgroups, the consumers, own 64 query rows each; other warps of the first one write lse for them. Blocks are persistent, and a consumer's
// pipeline never drains between the tiles that its block works on.
//
//   problem  bf16_d64_causal
//   config   warpgroups 2, block_kv 160, stages 2, query_stages 2, out_panels 1, reference lazy, turns True, scheduler dynamic, packed_heads 1
//   target   sm_90a
//   launch   <<<min(ceil(len_q / 128) * heads_q * batch, SMs * 1), 384, 132288 bytes>>>

// Fixed-width integers and element types. NVRTC brings no headers, so neither <cstdint> nor <cuda_bf16.h> is there.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct Bf16 { u16 bits; };
struct Fp16 { u16 bits; };

// A function: NVRTC has no constant expression for infinity without headers.
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Hints to the compiler about registers: no instructions.

// Hides where a value came from, so that the compiler keeps it in a register and does not compute it anew at each use.
template <class T>
__device__ __forceinline__ void keep_in_register(T*& pointer) {
    asm volatile("" : "+l"(pointer));
}
__device__ __forceinline__ void keep_in_register(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep_in_register(u32& value) { asm volatile("" : "+r"(value)); }

// Marks a fragment as read and written here: what the compiler does with it stays before, or comes after.
template <int kTiles>
__device__ __forceinline__ void keep_in_registers(float (&fragment)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(fragment[i][j])::"memory");
}
template <int kTiles>
__device__ __forceinline__ void keep_in_registers(u32 (&fragment)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(fragment[i][j])::"memory");
}

// Who a thread is. PTX ISA, "Special Registers": %tid, %ctaid.

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }

__device__ __forceinline__ int block_index() { return static_cast<int>(blockIdx.x); }

__device__ __forceinline__ int lane_index() { return thread_index() % 32; }

// The same for all lanes of a warp, which call this together. The shuffle tells the compiler so, which lets it keep what follows in uniform registers.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffff, thread_index() / 32, 0); }

// Shared memory: where it begins, and ordinary reads and writes of it. PTX ISA, "ld", "st", "cvta".

using SharedAddress = u32;  // byte address in the shared window

// The block's dynamic shared memory, aligned to 1024 bytes. The only shared variable of a kernel.
__device__ __forceinline__ SharedAddress shared_memory() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return static_cast<SharedAddress>(__cvta_generic_to_shared(memory));
}

// Bytes after each region that nobody may touch, and what watches over regions: only the host has them.
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

// Barriers. PTX ISA, "bar, barrier" and "bar.warp.sync".

// All threads of the block arrive; what they wrote to shared memory before is visible to all of them after.
__device__ __forceinline__ void barrier_sync() { __syncthreads(); }

// The lanes of a warp arrive; what they wrote to shared memory before is visible to all of them after.
__device__ __forceinline__ void barrier_warp_sync() { __syncwarp(); }

// Barriers of some of a block's warps, by number: 1 to 15. PTX ISA, "bar, barrier". Number 0 is barrier_sync's.

// Waits until `threads` have arrived, with those that do not wait; whole warps take part.
__device__ __forceinline__ void bar_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void bar_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

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

// Reads the box at coordinates (column, row, head, batch); its bytes, those outside of the tensor included, count at `barrier`.
__device__ __forceinline__ void cp_async_bulk_tensor_load(SharedAddress destination, const TensorMap& map, SharedAddress barrier, int column,
                                                          int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

// Writes the box at these coordinates, none of them negative: to a store (not to a load) that is an illegal instruction on sm_90. Shared memory was written before a fence_proxy_async, and stays as it is until the group has read it.
__device__ __forceinline__ void cp_async_bulk_tensor_store(const TensorMap& map, SharedAddress source, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(source), "r"(column),
                 "r"(row), "r"(head), "r"(batch)
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

// Asynchronous matrix products of a warpgroup, d (+)= a * b: 64x16 times 16xkN, fp32 accumulation. PTX ISA, "wgmma" (sm_90a).
//
// Warp w of the four holds rows 16w to 16w+15 of d and of a, each laid out as in mma_sync.cuh: d[j] is the column tile of 8 columns from 8j.
// Registers must not be touched between a product and the wait for it.

// Where a matrix lies in shared memory, in tiles with 128-byte swizzle. PTX ISA, "Matrix Descriptor Format": bits 0 to 13
// the address, 16 to 29 the leading and 32 to 45 the stride byte offset, all in units of 16 bytes; bits 62 and 63 the swizzle (1: 128 bytes).
// Columns of the shared dimension contiguous (K-major): rows of 128 bytes, groups of 8 of them 1024 bytes apart; no leading offset.
// Columns of the other dimension contiguous (MN-major): groups of 8 rows of the shared dimension 1024 bytes apart; panels of 64 columns
// `panel_bytes` apart. The matrix begins `offset` bytes after `address`: constants are added to the lower word, which never carries.
__device__ __forceinline__ u64 matrix_descriptor(SharedAddress address, u32 offset, u32 panel_bytes = 16) {
    return u64{0x40000040u} << 32 | ((panel_bytes >> 4 << 16 | address >> 4) + (offset >> 4));
}

// Both from shared memory, K-major. `accumulate` 0: d is only written.
template <class Element, int kN>
__device__ __forceinline__ void wgmma_ss(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate);

// a from registers, as in mma_sync.cuh; b from shared memory, MN-major.
template <class Element, int kN>
__device__ __forceinline__ void wgmma_rs(float (&d)[kN / 8][4], const u32 (&a)[4], u64 b, int accumulate);

// Before the first product, and after ordinary instructions wrote registers of the next ones.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of products issued since the last commit.
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the kPending latest groups are complete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Stores four 8x8 matrices of 16-bit elements from a warp's registers to shared memory. PTX ISA, "stmatrix" (sm_90).
//
// Lane l gives the address of row l % 8 of matrix l / 8, 16 bytes. Its r[i] holds row l / 4, columns 2 * (l % 4) and the next, of matrix i.
__device__ __forceinline__ void stmatrix_x4(SharedAddress row, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// Words of global memory by which blocks wait for each other. PTX ISA, "Memory Consistency Model"; "ld", "st" and "atom" with
// .acquire, .release and .gpu (sm_70).

// What was written before a release of this word, by any thread of the GPU, is seen after a load that reads the released value.
__device__ __forceinline__ u32 ld_acquire_gpu(const u32* address) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
    return value;
}

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

// Powers of 2. PTX ISA, "ex2" (error below 2 ulp; ex2(-inf) = +0).

__device__ __forceinline__ float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Products. PTX ISA, "mul".

// Rounded by itself: never fused with the addition that follows.
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }

// The upper 64 of the product's 128 bits.
__device__ __forceinline__ u64 mul_hi(u64 a, u64 b) { return __umul64hi(a, b); }

// Exchange of registers between the lanes of a warp. PTX ISA, "shfl.sync".

// The value of lane (own lane xor `lane_mask`). All 32 lanes take part.
__device__ __forceinline__ float shfl_sync_bfly(float value, int lane_mask) {
    return __shfl_xor_sync(0xffffffff, value, lane_mask);
}

// The value of lane 0, which the compiler then knows to be the same in all lanes. All 32 lanes take part.
__device__ __forceinline__ int shfl_sync_first(int value) { return __shfl_sync(0xffffffff, value, 0); }
__device__ __forceinline__ u32 shfl_sync_bfly(u32 value, int lane_mask) { return __shfl_xor_sync(0xffffffff, value, lane_mask); }

// Votes of a warp. PTX ISA, "vote.sync".

// Whether `predicate` holds for any of the 32 lanes. All take part.
__device__ __forceinline__ bool vote_sync_any(bool predicate) { return __any_sync(0xffffffff, predicate); }

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
        "}, %80, %81, p, 1, 1, 0, 0;\n"
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
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

using Element = Bf16;

// ---- what this kernel is specialised for ------------------------------------------------------------------------------

constexpr int kHeadDim = 64, kHeadDimV = 64;
constexpr int kWarpgroups = 2, kBlockKv = 160;
constexpr int kHeads = 1;  // of one group, whose rows take turns in a query tile
constexpr int kStages = 2, kQueryStages = 2, kOutPanels = 1;
constexpr bool kCausal = true, kLazy = true;
constexpr bool kTurns = true, kDynamic = true;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr bool kMovesRegisters = kProducerRegisters != kConsumerRegisters;

constexpr int kBlockQ = kWarpgroups * 64, kQueries = kBlockQ / kHeads;  // rows of a tile, and queries, which have kHeads rows each
constexpr int kThreads = (kWarpgroups + 1) * 128, kBlocksPerSm = 1;
constexpr int kColumns = (kHeadDim + 15) / 16 * 16, kColumnsV = (kHeadDimV + 15) / 16 * 16;  // as the matrix products take them

// lse is [batch, heads_q, len_q], dense, or null.
struct Parameters {
    TensorMap q_map;
    TensorMap k_map;
    TensorMap v_map;
    TensorMap out_map;
    float* lse;
    u32* tile_counter;
    u64 head_sets_reciprocal;
    u64 group_reciprocal;
    u64 section_heads_reciprocal;
    u64 section_blocks_reciprocal;
    int head_sets;
    int len_q;
    int len_kv;
    int query_tiles;
    int section_heads;
    int section_blocks;
    int tiles;
    int launched_blocks;
    float scale_log2;
    float natural;
    float natural_low;
};

// ---- tile operations --------------------------------------------------------------------------------------------------

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

// Which work a block does: block index -> (query tile, head, batch), and which key steps that takes.

// n / divisor, given `reciprocal` = ceil(2^64 / divisor), or 0 for a divisor of 1 (Lemire, Kaser and Kurz 2019: exact for 32 bits).
__device__ __forceinline__ int divide(int n, u64 reciprocal) { return reciprocal == 0 ? n : static_cast<int>(mul_hi(n, reciprocal)); }

struct Work {
    int query_tile, head, batch;
};

// The order of the blocks. Heads come in sections whose K and V fit into the L2 together. Within a section all heads' last query tiles come
// first: under a causal mask they have the most keys, and a launch should not end with the longest blocks. A section of one
// head has its query tiles next to each other.
struct Order {
    int query_tiles, section_heads, section_blocks;
    u64 section_heads_reciprocal, section_blocks_reciprocal;
};

__device__ __forceinline__ Work find_work(int block, const Order& order, int heads, u64 heads_reciprocal) {
    const int section = divide(block, order.section_blocks_reciprocal), within = block - section * order.section_blocks;
    const int tile = divide(within, order.section_heads_reciprocal);
    const int head_and_batch = section * order.section_heads + within - tile * order.section_heads;
    const int batch = divide(head_and_batch, heads_reciprocal);
    return {order.query_tiles - 1 - tile, head_and_batch - batch * heads, batch};
}

// Key steps [0, full) are seen whole by every query of the tile, [full, end) need masking, the rest is seen by none. Each query that sees keys
// sees one of [full, end), unless that is empty: what a row needs when it sees its first key is done there.
struct KeySteps {
    int full, end;
};

template <bool kCausal, int kBlockQ, int kStepKv>
__device__ __forceinline__ KeySteps find_key_steps(int first_query, int len_kv, int diagonal) {
    // The first query sees keys [0, seen_by_first), the last one [0, seen_by_last).
    const int seen_by_first = kCausal ? min(len_kv, max(0, first_query + 1 + diagonal)) : len_kv;
    const int seen_by_last = kCausal ? min(len_kv, max(0, first_query + kBlockQ + diagonal)) : len_kv;
    return {(seen_by_first - (seen_by_first < seen_by_last)) / kStepKv, (seen_by_last + kStepKv - 1) / kStepKv};
}

// Stages of shared memory that producers fill, by asynchronous copies or themselves, and consumers use up: two mbarriers for each stage say whose it is.

__device__ __forceinline__ void wait(SharedAddress barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {}
}

// The stage that is next, and the parity of its phase.
template <int kStages>
struct StageOrder {
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

    // By one thread. `producers` threads announce or hand over each stage, `consumers` release it.
    __device__ __forceinline__ void initialise(int producers, int consumers) const {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(full(stage), producers);
            mbarrier_init(empty(stage), consumers);
        }
    }
    // A producer: waits until the stage is free; announces the bytes that will land in it, or hands over what it wrote itself.
    __device__ __forceinline__ void wait_empty(const StageOrder<kStages>& next) const { wait(empty(next.stage), next.parity ^ 1); }
    __device__ __forceinline__ void announce(const StageOrder<kStages>& next, u32 bytes) const {
        mbarrier_arrive_expect_tx(full(next.stage), bytes);
    }
    __device__ __forceinline__ void hand_over(u32 stage, bool elected) const {
        if (elected) mbarrier_arrive(full(stage));
    }
    // The consumers: wait until the stage is filled; give it back.
    __device__ __forceinline__ void wait_full(const StageOrder<kStages>& next) const { wait(full(next.stage), next.parity); }
    __device__ __forceinline__ void release(u32 stage, bool elected) const {
        if (elected) mbarrier_arrive(empty(stage));
    }
};

// A tile in shared memory as tensor copies with 128-byte swizzle write it and wgmma reads it: panels of 64 columns, one after the other,
// each kRows rows of 128 bytes. Within a panel the 16-byte chunks of row r are permuted: chunk c lies at c xor r % 8.

template <int kRows, int kColumns>
struct PanelTile {
    static constexpr int kPanels = (kColumns + 63) / 64, kPanelBytes = kRows * 128, kBytes = kPanels * kPanelBytes;
    SharedAddress base;

    // Loads rows from `row` on, all columns. What lies outside of the tensor becomes zeros.
    __device__ __forceinline__ void load(const TensorMap& map, SharedAddress barrier, int row, int head, int batch) const {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            cp_async_bulk_tensor_load(base + panel * kPanelBytes, map, barrier, panel * 64, row, head, batch);
    }
    // The operand of 16 columns, rows from `row` on (a multiple of 8), where columns are the shared dimension of the product.
    __device__ __forceinline__ u64 columns(int row, int step) const {
        return matrix_descriptor(base, row * 128 + step / 4 * kPanelBytes + step % 4 * 32);
    }
    // The operand of 16 rows, all columns, where rows are the shared dimension.
    __device__ __forceinline__ u64 rows(int step) const { return matrix_descriptor(base, step * 16 * 128, kPanelBytes); }
    __device__ __forceinline__ SharedAddress at(int row, int chunk) const { return base + row * 128 + ((chunk ^ row % 8) * 16); }
};

// The two matrix products of attention, for one warpgroup and its 64 query rows: S = Q K^T and O += P V. Both are issued, not waited for.

// scores = Q K^T over kColumns columns, for the rows of Q from `row` on.
template <class Element, int kColumns, class QueryTile, class KeyTile, int kKeyTiles>
__device__ __forceinline__ void gemm_scores(float (&scores)[kKeyTiles][4], QueryTile queries, int row, KeyTile keys) {
    keep_in_register(queries.base);  // else the operands of all steps, which change rarely, would be kept in registers
    keep_in_register(keys.base);
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step)
        wgmma_ss<Element, kKeyTiles * 8>(scores, queries.columns(row, step), keys.columns(0, step), step > 0);
}

// out += P V.
template <class Element, class ValueTile, int kSteps, int kOutTiles>
__device__ __forceinline__ void gemm_output(float (&out)[kOutTiles][4], const u32 (&probabilities)[kSteps][4], ValueTile values) {
    keep_in_register(values.base);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        wgmma_rs<Element, kOutTiles * 8>(out, probabilities[step], values.rows(step), 1);
}

// Which scores count: sets the others to -inf. Score modifications (biases, windows, soft caps) would have their place here.

// `first_row` and `first_key` are the positions of scores[0][0] of this warp; kHeads rows, of as many heads, are of one query. A key counts if
// it is below min(len_kv, query + 1 + diagonal): for a causal mask aligned bottom-right, diagonal = len_kv - len_q.
template <bool kCausal, int kHeads = 1, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void mask_scores(float (&scores)[kRowTiles][kKeyTiles][4], int first_row, int first_key, int len_kv, int diagonal) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int query = (first_row + i * 16 + e / 2 * 8 + lane / 4) / kHeads;
            const int end = kCausal ? min(len_kv, query + 1 + diagonal) : len_kv;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j)
                if (first_key + j * 8 + lane % 4 * 2 + e % 2 >= end) scores[i][j][e] = -infinity();
        }
}

// What every form of the online softmax needs of a row, whose scores four neighbouring lanes hold.

// How far above its reference a score may lie before a reference that follows the maximum does so: fp16 still holds a probability of 2^8.
constexpr float kHeadroom = 8.0f;

// The reference of a row that has seen no key yet: its scores are all -inf, and -inf - (-inf) would be NaN. Any finite score outgrows it.
constexpr float kNoReference = -3.0e38f;

// One fused multiply-add computes the exponent of a score S, S * scale_log2 - reference, where the reference is the scaled maximum, rounded. The
// larger the maximum, the more that rounding is worth, in the end more than all the range of an exponent. So the scores of a huge row are first
// shifted by the maximum itself: its exponent is (S - shift) * scale_log2. Other rows have a shift of 0, and huge ones a reference of 0.
struct Origin {
    float shift, reference;
};

// Scaled maxima from here on are huge. Below, rounding one changes an exponent by at most 2^-12: the maximum's own probability still rounds to 1 in fp16.
constexpr float kHuge = 0x1p13f;

// Whether a maximum is huge. That of a row that sees no key, -inf, is not.
__device__ __forceinline__ bool is_huge(float maximum, float scaled) { return !(fabsf(scaled) < kHuge) && maximum > -infinity(); }

// The origin for a maximum. One that fp32 cannot hold once it is scaled makes the row NaN, as in plain PyTorch.
__device__ __forceinline__ Origin origin_at(float maximum, float scale_log2, float natural) {
    const float scaled = mul_rn(maximum, scale_log2);
    if (!is_huge(maximum, scaled)) return {0.0f, scaled};
    return {fmaf(0.0f, mul_rn(maximum, natural) * scale_log2, maximum), 0.0f};  // 0 * inf is NaN
}

// Says that a condition hardly ever holds: what depends on it then lies apart from the code that is run all the time, and costs that nothing.
__device__ __forceinline__ bool unlikely(bool condition) { return __builtin_expect(condition, false); }

// Moves a row's origin to `maximum` if that lies above it. Returns by what the row's sums and output have to be multiplied.
__device__ __forceinline__ float move_origin(Origin& origin, float maximum, float scale_log2, float natural) {
    const bool unseen = origin.reference == kNoReference;
    const float height = unseen ? maximum + infinity() : fmaf(maximum - origin.shift, scale_log2, -origin.reference);
    if (!(height > 0.0f)) return 1.0f;
    const Origin before = origin;
    origin = origin_at(maximum, scale_log2, natural);
    return unseen ? 0.0f : ex2_approx_ftz(fmaf(before.shift - origin.shift, scale_log2, before.reference - origin.reference));
}

// The highest of this lane's scores of row lane/4 + h*8. In two chains: one would be twice as long.
template <int kKeyTiles>
__device__ __forceinline__ float lane_maximum(const float (&scores)[kKeyTiles][4], int h) {
    float chain[2] = {fmaxf(scores[0][h * 2], scores[0][h * 2 + 1]), fmaxf(scores[1][h * 2], scores[1][h * 2 + 1])};
#pragma unroll
    for (int j = 2; j < kKeyTiles; ++j) chain[j % 2] = fmaxf(chain[j % 2], fmaxf(scores[j][h * 2], scores[j][h * 2 + 1]));
    return fmaxf(chain[0], chain[1]);
}

// Of the four lanes' values, the highest, and the sum.
__device__ __forceinline__ float row_maximum(float value) {
    value = fmaxf(value, shfl_sync_bfly(value, 1));
    return fmaxf(value, shfl_sync_bfly(value, 2));
}
__device__ __forceinline__ float row_sum(float value) {
    value += shfl_sync_bfly(value, 1);
    return value + shfl_sync_bfly(value, 2);
}

// What a row's output is multiplied with in the end: 1 / total, to 1 ulp; 0 for a row that saw no key. A guess that is good to 5 %, and Newton's
// method three times: a division would bring a branch, and rcp.approx differ from machine to machine.
__device__ __forceinline__ float normaliser(float total) {
    float y = __int_as_float(0x7ef311c3 - __float_as_int(total));
#pragma unroll
    for (int i = 0; i < 3; ++i) y = fmaf(y, fmaf(-total, y, 1.0f), y);
    return total == 0.0f ? 0.0f : y;
}

// The log-sum-exp of a row, from what the softmax has summed up.

// By how much ex2.approx is too small on average, relatively, for arguments from -16 to -1 (measured on sm_90). For one value that
// is nothing; it is put right where it adds up: in the sum, and in the factor that rescales the sum.
constexpr float kEx2Lean = 5.0e-8f;

// Natural logarithm of 1 + x, for x from sqrt(1/2) - 1 to sqrt(2) - 1, to 1.2 ulp: x - x^2/2 + x^3 q(x), where q makes the relative error least.
__device__ __forceinline__ float log_near_one(float x) {
    constexpr float kQ[] = {0x1.645dd8p-4f, -0x1.24326cp-3f, 0x1.31745ap-3f, -0x1.538254p-3f, 0x1.98d7f4p-3f, -0x1.000382p-2f, 0x1.5556d8p-2f, -0.5f};
    float q = kQ[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) q = fmaf(q, x, kQ[i]);
    return fmaf(mul_rn(q, x), x, x);
}

// What turns a reference into a scaled score, in two floats.
struct Unit {
    float high, low;

    // Of a reference that is a score itself, not yet scaled: the scale, which is scale_log2 * (natural + natural_low).
    __device__ __forceinline__ static Unit of_score(float scale_log2, float natural, float natural_low) {
        const float high = mul_rn(scale_log2, natural);
        return {high, fmaf(scale_log2, natural, -high) + scale_log2 * natural_low};
    }
};

// log(total) + reference * (unit.high + unit.low), to about one rounding. fp32 needs some care for that: the two terms are taken
// apart into what is rounded once, in the end, and small corrections. `total` is finite and > 0, or NaN.
__device__ __forceinline__ float log_sum_exp(float reference, float total, const Unit& unit) {
    constexpr float kLn2 = 0.693147182f, kLn2Low = -1.90465430e-9f;
    // total = fraction * 2^exponent, with a fraction from sqrt(1/2) to sqrt(2).
    const int power = (__float_as_int(total) - __float_as_int(0.70710678f)) >> 23;
    const float exponent = static_cast<float>(power), fraction = __int_as_float(__float_as_int(total) - (power << 23));
    const float inverse = (2.0f - fraction) * __int_as_float((127 - power) << 23);  // of total, to 20 %, and exactly 1 for 1
    const float a = mul_rn(reference, unit.high), b = mul_rn(exponent, kLn2);
    const float sum = a + b, b_in_sum = sum - a;
    const float lost_in_sum = (a - (sum - b_in_sum)) + (b - b_in_sum);  // exactly (Knuth's TwoSum)
    const float lost_in_products = fmaf(reference, unit.high, -a) + fmaf(exponent, kLn2, -b);
    const float low_parts = reference * unit.low + exponent * kLn2Low;
    const float lean = kEx2Lean * (1.0f - inverse);  // the 2^0 = 1 of the score that became the reference is exact
    const float corrections = lost_in_sum + lost_in_products + low_parts + lean;
    return sum + (log_near_one(fraction - 1.0f) + fmaf(0.0f, total, corrections));  // 0 * NaN: the bits taken apart look like a number
}

// The log-sum-exp of a row's scaled scores. natural + natural_low is scale / scale_log2, about ln 2. A row that saw no key gets -inf.
__device__ __forceinline__ float log_sum_exp(const Origin& origin, float total, float scale_log2, float natural, float natural_low) {
    const bool huge = origin.shift != 0.0f;
    const Unit unit = huge ? Unit::of_score(scale_log2, natural, natural_low) : Unit{natural, natural_low};
    const float value = log_sum_exp(huge ? origin.shift : origin.reference, total, unit);
    return total == 0.0f ? -infinity() : value;
}

// What a row's log-sum-exp comes from, handed from the warpgroup that has summed it up to the warp that writes it.

// A huge row hands over its shift in place of the reference, and its total with the sign turned.
struct RowSum {
    float total, reference;

    __device__ __forceinline__ Origin origin() const { return total < 0.0f ? Origin{reference, 0.0f} : Origin{0.0f, reference}; }
};

// Of two rows of a warp's 16, eight apart. The warpgroup has 32 such pairs, in the order of its warps and rows.
struct RowSums {
    RowSum rows[2];

    // By the warpgroup: of rows lane/4 and lane/4 + 8 of each warp, the same in the four lanes that have them.
    __device__ __forceinline__ void store(SharedAddress sums) const {
        if (lane_index() % 4) return;
        const int pair = thread_index() / 32 % 4 * 8 + lane_index() / 4;
        store_shared_v4(sums + pair * 16, {__float_as_uint(rows[0].total), __float_as_uint(rows[0].reference), __float_as_uint(rows[1].total),
                                           __float_as_uint(rows[1].reference)});
    }
    // By one warp: a pair for each lane, of the rows from `first_row_of_pair` on.
    __device__ __forceinline__ static RowSums load(SharedAddress sums) {
        const uint4 v = load_shared_v4(sums + lane_index() * 16);
        return {{{__uint_as_float(v.x), __uint_as_float(v.y)}, {__uint_as_float(v.z), __uint_as_float(v.w)}}};
    }
    __device__ __forceinline__ static int first_row_of_pair() { return lane_index() / 8 * 16 + lane_index() % 8; }
};

// Online softmax in base 2 with a lazy reference: a row's probabilities are relative to a reference that an early key block gave, with no look
// at the maximum of later ones. The sum, which is needed anyway, tells when scores have outgrown it: only then is the block done again with
// a reference that follows the maximum, and what was summed before is rescaled. From there on the tile's reference follows the maximum of each
// block, so that no input costs more than one block done twice. Each warp decides by its own rows alone: results must not depend on who was first.

// How large a lane's sum over one block may get: so large may a probability get, which the element must hold. bf16 holds any; 2^72 leaves the
// fp32 output 2^41 for the values of V over 16384 such keys.
template <class Element>
__device__ __forceinline__ float sum_limit();
template <>
__device__ __forceinline__ float sum_limit<Bf16>() { return 0x1p72f; }
template <>
__device__ __forceinline__ float sum_limit<Fp16>() { return 0x1p15f; }

// The state of a thread's two rows of 16, lane/4 + h*8. The four lanes of a row hold the same reference, and each the sum over its own columns
// until `finish` adds them up.
template <class Element, bool kLazy>
struct OnlineSoftmax {
    float reference[2];       // scale_log2 * maximum of the scores when they last outgrew it, rounded
    float shift[2];           // of a row that is huge, or 0; only where `huge`
    float sum[2], lost[2];    // lost: what the additions to `sum` rounded away (Dekker 1971); over many blocks it adds up
    float factor[2];          // by which the output has to be multiplied, if it is `outgrown`
    bool outgrown;            // by the last block; the same in the whole warp
    bool redone;              // a block of this tile was, or a row of the warp is huge
    bool huge;                // a row of the warp is
    float scale_log2, natural;

    __device__ __forceinline__ OnlineSoftmax(float scale_log2, float natural) : outgrown(false), scale_log2(scale_log2), natural(natural) { restart(); }

    // A new tile begins.
    __device__ __forceinline__ void restart() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            reference[h] = kNoReference;
            shift[h] = 0.0f;
            sum[h] = lost[h] = 0.0f;
        }
        redone = huge = false;
    }

    // Lets the references follow these scores if one has outgrown them. Scores of a huge warp are shifted.
    template <int kKeyTiles>
    __device__ __forceinline__ void follow(float (&scores)[kKeyTiles][4]) {
        float maximum[2], highest[2];
        bool above = false, far = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            maximum[h] = row_maximum(lane_maximum(scores, h));
            highest[h] = mul_rn(maximum[h], scale_log2);
            above |= highest[h] - reference[h] > kHeadroom;
            far |= is_huge(maximum[h], highest[h]);
        }
        huge |= vote_sync_any(far);
        outgrown = vote_sync_any(above);
        if (unlikely(huge)) {
            follow_huge(scores, maximum);
        } else if (outgrown) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float next = fmaxf(reference[h], highest[h]);
                rescale_sum(h, ex2_approx_ftz(reference[h] - next));
                reference[h] = next;
            }
        }
    }
    template <int kKeyTiles>
    __device__ __forceinline__ void follow_huge(float (&scores)[kKeyTiles][4], const float (&maximum)[2]) {
        outgrown = redone = true;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Origin origin{shift[h], reference[h]};
            rescale_sum(h, move_origin(origin, maximum[h], scale_log2, natural));
            shift[h] = origin.shift;
            reference[h] = origin.reference;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                scores[j][h * 2] -= shift[h];
                scores[j][h * 2 + 1] -= shift[h];
            }
        }
    }
    __device__ __forceinline__ void rescale_sum(int h, float by) {
        factor[h] = by;
        const float factor_of_sum = fmaf(by, kEx2Lean, by);  // 1 for a factor of 1
        sum[h] *= factor_of_sum;
        lost[h] *= factor_of_sum;
    }

    // Probabilities of a key block, relative to the reference, as the operand of the product with V: two neighbouring column tiles of the
    // accumulator layout are one such operand, rounded to Element. Adds them to the sums. `begins`: rows may have seen no key before.
    template <int kKeyTiles>
    __device__ __forceinline__ void probabilities(u32 (&p)[kKeyTiles / 2][4], float (&scores)[kKeyTiles][4], bool begins) {
        bool follows = !kLazy || begins || redone;
        outgrown = false;
        float partial[2][2];
#pragma unroll 1
        for (;;) {  // a loop, so that the exponentials are there once
            if (follows) follow(scores);
            partial[0][0] = partial[0][1] = partial[1][0] = partial[1][1] = 0.0f;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float low = ex2_approx_ftz(fmaf(scores[j][h * 2], scale_log2, -reference[h]));
                    const float high = ex2_approx_ftz(fmaf(scores[j][h * 2 + 1], scale_log2, -reference[h]));
                    partial[h][0] += low;
                    partial[h][1] += high;
                    p[j / 2][j % 2 * 2 + h] = cvt_rn_x2<Element>(low, high);
                }
#pragma unroll
            for (int h = 0; h < 2; ++h) partial[h][0] += partial[h][1];
            if (!kLazy || follows) break;
            const bool fits = partial[0][0] < sum_limit<Element>() && partial[1][0] < sum_limit<Element>();
            if (!vote_sync_any(!fits)) break;
            follows = redone = true;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float before = sum[h];
            sum[h] = before + partial[h][0];
            lost[h] += partial[h][0] - (sum[h] - before);
        }
    }

    template <int kOutTiles>
    __device__ __forceinline__ void rescale(float (&out)[kOutTiles][4]) const {
#pragma unroll
        for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[j][e] *= factor[e / 2];
    }

    // What the output has to be multiplied with in the end, and what its log-sum-exp comes from.
    __device__ __forceinline__ RowSums finish(float (&inverse)[2]) const {
        RowSums sums;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sums.rows[h] = {row_sum(sum[h] + lost[h]), reference[h]};
            inverse[h] = normaliser(sums.rows[h].total);
            if (unlikely(huge) && shift[h] != 0.0f) sums.rows[h] = {-sums.rows[h].total, shift[h]};
        }
        return sums;
    }
};

// From a warp's accumulator to memory: the output as tensor copies of panels of 64 columns, by way of a ring of panels in shared memory.

// Rounds out * inverse and stores the warp's 16 rows from `row` on; rows and columns outside of the tensor are left out. `ring` has kPanels
// panels of 16 rows, which no other warp uses. The copies may still read it on return; `out` is zero then.
template <class Element, int kPanels, int kOutTiles>
__device__ __forceinline__ void store_output(const TensorMap& map, float (&out)[kOutTiles][4], const float (&inverse)[2],
                                             SharedAddress ring, int row, int head, int batch) {
    // Each call begins at the ring's begin: unless the panels of the call before went round evenly, its last one may be just there.
    constexpr int kFirstPending = (kOutTiles + 7) / 8 % kPanels == 0 ? kPanels - 1 : 0;
    int lane = lane_index();
    keep_in_register(lane);  // else places in the ring, which are needed once a tile, would be kept in registers
#pragma unroll
    for (int panel = 0; panel * 8 < kOutTiles; ++panel) {
        const PanelTile<16, 64> place{ring + panel % kPanels * PanelTile<16, 64>::kBytes};
        if (panel == 0) {
            if (lane == 0) cp_async_bulk_wait_group_read<kFirstPending>();
        } else {
            if (lane == 0) cp_async_bulk_wait_group_read<kPanels - 1>();
        }
        barrier_warp_sync();
#pragma unroll
        for (int chunk = 0; chunk < 8; chunk += 2) {
            const int j = panel * 8 + chunk;
            if (j >= kOutTiles) break;
            u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float (&pair)[4] = out[j + i / 2];
                r[i] = cvt_rn_x2<Element>(pair[i % 2 * 2] * inverse[i % 2], pair[i % 2 * 2 + 1] * inverse[i % 2]);
                pair[i % 2 * 2] = pair[i % 2 * 2 + 1] = 0.0f;
            }
            stmatrix_x4(place.at(lane % 16, chunk + lane / 16), r[0], r[1], r[2], r[3]);
        }
        fence_proxy_async();
        barrier_warp_sync();
        if (lane == 0) {
            cp_async_bulk_tensor_store(map, place.base, panel * 64, row, head, batch);
            cp_async_bulk_commit_group();
        }
    }
}

// ---- the kernel -------------------------------------------------------------------------------------------------------

using QueryTile = PanelTile<kBlockQ, kColumns>;
using KeyTile = PanelTile<kBlockKv, kColumns>;
using ValueTile = PanelTile<kBlockKv, kColumnsV>;

constexpr int kOutBytes = kOutPanels * PanelTile<16, 64>::kBytes;  // of a warp
constexpr int kSumsBytes = 64 * 8;                                // of a warpgroup
constexpr int kTiles = kQueryStages + 2;  // of which a block knows: with queries on their way, in work, with output to be stored

constexpr int kTurn = 1;  // and on: barriers of two warpgroups each, by which they take turns at issuing products

// A query tile, and how many key blocks its rows see, at least one: of rows that see no key a block is masked whole. 0 blocks: there is no tile.
// Row r is of query first_query + r / kHeads and of head first_head + r % kHeads.
struct Tile {
    static constexpr int kBytes = 16;
    int first_query, first_head, batch, blocks;

    __device__ __forceinline__ static Tile find(const Parameters& p, int index) {
        const Order order{p.query_tiles, p.section_heads, p.section_blocks, p.section_heads_reciprocal, p.section_blocks_reciprocal};
        const Work work = find_work(index, order, p.head_sets, p.head_sets_reciprocal);
        const int first_query = work.query_tile * kQueries;
        const KeySteps steps = find_key_steps<kCausal, kQueries, kBlockKv>(first_query, p.len_kv, p.len_kv - p.len_q);
        return {first_query, work.head * kHeads, work.batch, max(steps.end, 1)};
    }
    // Coordinates of row `row` as the tensor maps of queries and output have them: where heads are packed, these come before queries.
    __device__ __forceinline__ int first(int row = 0) const { return kHeads == 1 ? first_query + row : first_head; }
    __device__ __forceinline__ int second(int row = 0) const { return kHeads == 1 ? first_head : first_query + row / kHeads; }
    __device__ __forceinline__ static Tile load(SharedAddress place) {
        const uint4 v = load_shared_v4(place);
        return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), static_cast<int>(v.w)};
    }
    __device__ __forceinline__ void store(SharedAddress place) const {
        store_shared_v4(place, {static_cast<u32>(first_query), static_cast<u32>(first_head), static_cast<u32>(batch), static_cast<u32>(blocks)});
    }
};

// What the roles share: places in shared memory, and whose they are.
struct Stages {
    SharedAddress queries, keys, values, out, sums, tiles;  // tiles: kTiles of them, in turn
    Pipeline<kQueryStages> query_pipeline;
    Pipeline<kStages> key_pipeline, value_pipeline;
    Pipeline<1> sums_pipelines;  // the first of one for each consumer, which fills it

    __device__ __forceinline__ Pipeline<1> sums_pipeline(int warpgroup) const { return {sums_pipelines.barriers + warpgroup * Pipeline<1>::kBytes}; }
    __device__ __forceinline__ SharedAddress sums_of(int warpgroup) const { return sums + warpgroup * kSumsBytes; }
    __device__ __forceinline__ SharedAddress tile(u32 place) const { return tiles + place * Tile::kBytes; }
    __device__ __forceinline__ QueryTile query_tile(u32 stage) const { return {queries + stage * QueryTile::kBytes}; }
    __device__ __forceinline__ KeyTile key_tile(u32 stage) const { return {keys + stage * KeyTile::kBytes}; }
    __device__ __forceinline__ ValueTile value_tile(u32 stage) const { return {values + stage * ValueTile::kBytes}; }
};

// The tile that this block works on after tile `index`. It is asked for late: blocks that are ahead claim more tiles.
__device__ __forceinline__ int next_tile(const Parameters& p, int index) {
    if (!kDynamic) return index + p.launched_blocks;
    const int claims = static_cast<int>(atom_add_acq_rel_gpu(p.tile_counter, 1));
    if (claims == p.tiles - 1) st_release_gpu(p.tile_counter, 0);  // the launch's last claim: for the next launch
    return claims + p.launched_blocks;
}

// Loads, in the order in which the consumers want it, for all tiles of this block: keys and values of one block after the other, from the last
// to the first, the values one block behind; the queries of a tile with its first keys.
__device__ __forceinline__ void produce(const Parameters& p, const Stages& stages) {
    StageOrder<kQueryStages> query_order;
    StageOrder<kTiles> tile_order;
    StageOrder<kStages> key_order, value_order;
    int value_block = -1, value_head = 0, value_batch = 0;
    auto load_values = [&] {
        if (value_block < 0) return;
        stages.value_pipeline.wait_empty(value_order);
        stages.value_pipeline.announce(value_order, ValueTile::kBytes);
        stages.value_tile(value_order.stage).load(p.v_map, stages.value_pipeline.full(value_order.stage), value_block * kBlockKv, value_head, value_batch);
        value_order.advance();
    };
    prefetch_tensormap(p.q_map);
    prefetch_tensormap(p.k_map);
    prefetch_tensormap(p.v_map);
    int index = block_index();
#pragma unroll 1
    while (index < p.tiles) {
        const Tile tile = Tile::find(p, index);
        const int head_kv = divide(tile.first_head, p.group_reciprocal);
        int next = index;
#pragma unroll 1
        for (int block = tile.blocks - 1; block >= 0; --block) {
            stages.key_pipeline.wait_empty(key_order);
            stages.key_pipeline.announce(key_order, KeyTile::kBytes);
            stages.key_tile(key_order.stage).load(p.k_map, stages.key_pipeline.full(key_order.stage), block * kBlockKv, head_kv, tile.batch);
            key_order.advance();
            if (block == tile.blocks - 1) {
                stages.query_pipeline.wait_empty(query_order);
                tile.store(stages.tile(tile_order.stage));
                tile_order.advance();
                stages.query_pipeline.announce(query_order, QueryTile::kBytes);
                stages.query_tile(query_order.stage).load(p.q_map, stages.query_pipeline.full(query_order.stage), tile.first(), tile.second(), tile.batch);
                query_order.advance();
            }
            if (block == min(1, tile.blocks - 1)) next = next_tile(p, index);
            load_values();
            value_block = block, value_head = head_kv, value_batch = tile.batch;
        }
        index = next;
    }
    load_values();
    stages.query_pipeline.wait_empty(query_order);
    Tile{}.store(stages.tile(tile_order.stage));
    mbarrier_arrive(stages.query_pipeline.full(query_order.stage));
}

// lse of a consumer's rows, by one warp. The consumer hands over sums and goes on: logarithms would keep it between two tiles, where nothing else
// is under way.
__device__ __forceinline__ void write_lse(const Parameters& p, const Stages& stages, int warpgroup) {
    const Pipeline<1> pipeline = stages.sums_pipeline(warpgroup);
    StageOrder<1> order;
    StageOrder<kTiles> tile_order;
#pragma unroll 1
    for (;;) {
        pipeline.wait_full(order);
        const Tile tile = Tile::load(stages.tile(tile_order.stage));
        if (tile.blocks == 0) return;
        tile_order.advance();
        const RowSums sums = RowSums::load(stages.sums_of(warpgroup));
        barrier_warp_sync();
        pipeline.release(order.stage, lane_index() == 0);
        order.advance();
        const i64 first_head = static_cast<i64>(tile.batch) * p.head_sets * kHeads + tile.first_head;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = warpgroup * 64 + RowSums::first_row_of_pair() + i * 8, query = tile.first_query + row / kHeads;
            const float lse = log_sum_exp(sums.rows[i].origin(), fabsf(sums.rows[i].total), p.scale_log2, p.natural, p.natural_low);
            if (query < p.len_q) p.lse[(first_head + row % kHeads) * p.len_q + query] = lse;
        }
    }
}

// One warpgroup, and its rows of all tiles of this block. What it computes stays in registers: all of this becomes one function.
struct Consumer {
    using Probabilities = u32[kBlockKv / 16][4];

    const Parameters& p;
    const Stages& stages;
    const int warpgroup;
    const bool elected;
    StageOrder<kQueryStages> query_order;
    StageOrder<kTiles> tile_order;
    StageOrder<kStages> key_order, value_order;
    StageOrder<1> sums_order;
    OnlineSoftmax<Element, kLazy> softmax;
    float scores[1][kBlockKv / 8][4], out[kColumnsV / 8][4] = {};
    Probabilities probabilities[2];         // of the block whose product with V is under way, and of the next one
    SharedAddress tile = 0, finished = 0;   // in work; whose output is to be stored
    int first_query, block, first_masked;   // of the tile in work
    float inverse[2];
    bool output_whole = false;  // the accumulator has the whole output of `finished`
    int value_in_use = -1;

    __device__ __forceinline__ Consumer(const Parameters& p, const Stages& stages, int warpgroup)
        : p(p), stages(stages), warpgroup(warpgroup), elected(thread_index() % 128 == 0), softmax(p.scale_log2, p.natural) {}

    // This warp's first row within a tile. Computed anew where it is needed: a register kept for it would be missing elsewhere.
    __device__ __forceinline__ static int first_row() {
        int thread = thread_index();
        keep_in_register(thread);
        return thread / 32 * 16 - 64;
    }

    // Waits for the next tile's queries. False if there is none.
    __device__ __forceinline__ bool wait_for_tile() const {
        stages.query_pipeline.wait_full(query_order);
        return shfl_sync_first(Tile::load(stages.tile(tile_order.stage)).blocks) > 0;
    }
    __device__ __forceinline__ void begin_tile() {
        tile = stages.tile(tile_order.stage);
        tile_order.advance();
        const Tile begun = Tile::load(tile);
        first_query = begun.first_query;
        block = shfl_sync_first(begun.blocks) - 1;
        first_masked = find_key_steps<kCausal, 64 / kHeads, kBlockKv>(first_query + warpgroup * (64 / kHeads), p.len_kv, p.len_kv - p.len_q).full;
    }
    __device__ __forceinline__ void finish_tile() {
        const RowSums sums = softmax.finish(inverse);
        if (p.lse != nullptr) hand_over(sums);
        finished = tile;
        output_whole = true;
    }
    __device__ __forceinline__ void hand_over(const RowSums& sums) {
        const Pipeline<1> pipeline = stages.sums_pipeline(warpgroup);
        pipeline.wait_empty(sums_order);
        sums.store(stages.sums_of(warpgroup));
        barrier_warp_sync();
        pipeline.hand_over(sums_order.stage, lane_index() == 0);
        sums_order.advance();
    }

    __device__ __forceinline__ void issue_scores() {
        stages.key_pipeline.wait_full(key_order);
        wgmma_fence();
        gemm_scores<Element, kColumns>(scores[0], stages.query_tile(query_order.stage), warpgroup * 64, stages.key_tile(key_order.stage));
        wgmma_commit_group();
    }
    // The scores are there. Turns them into probabilities.
    __device__ __forceinline__ void use_scores(Probabilities& made, bool first) {
        keep_in_registers(scores[0]);
        stages.key_pipeline.release(key_order.stage, elected);
        key_order.advance();
        const bool masked = block >= first_masked;
        if (masked) mask_scores<kCausal, kHeads>(scores, first_query * kHeads + first_row(), block * kBlockKv, p.len_kv, p.len_kv - p.len_q);
        if (block == 0) release_queries();
        softmax.probabilities(made, scores[0], first || masked);
    }
    // The tile's last scores are there. Each warp for itself: its lanes have read of tiles whose places the producer may write next.
    __device__ __forceinline__ void release_queries() {
        barrier_warp_sync();
        stages.query_pipeline.release(query_order.stage, lane_index() == 0);
        query_order.advance();
    }

    __device__ __forceinline__ void issue_output(Probabilities& used) {
        stages.value_pipeline.wait_full(value_order);
        keep_in_registers(out);
        keep_in_registers(used);
        wgmma_fence();
        gemm_output<Element>(out, used, stages.value_tile(value_order.stage));
        wgmma_commit_group();
    }
    // The product before is complete: its values are free, and its output is whole or may have to be rescaled.
    __device__ __forceinline__ void settle_output() {
        keep_in_registers(out);
        if (value_in_use >= 0) stages.value_pipeline.release(value_in_use, elected);
        if (output_whole) {
            const Tile of = Tile::load(finished);
            const int row = first_row();
            store_output<Element, kOutPanels>(p.out_map, out, inverse, stages.out + row / 16 * kOutBytes, of.first(row), of.second(row), of.batch);
            output_whole = false;
        } else if (softmax.outgrown) {
            softmax.rescale(out);
        }
    }

    // One key block: while its scores are computed and turned into probabilities, those of the block before are multiplied with V. False if
    // there is no more: `used` is left to `drain`.
    __device__ __forceinline__ bool step(Probabilities& used, Probabilities& made) {
        const bool first = --block < 0;
        if (first && !wait_for_tile()) return false;
        if (kTurns) bar_sync(kTurn + warpgroup, 256);
        issue_scores();
        wgmma_wait_group<1>();
        settle_output();
        issue_output(used);
        if (kTurns) bar_arrive(kTurn + (warpgroup + 1) % kWarpgroups, 256);
        if (first) {
            finish_tile();
            begin_tile();
            softmax.restart();
        }
        wgmma_wait_group<1>();
        value_in_use = value_order.stage;
        value_order.advance();
        use_scores(made, first);
        if (first) softmax.outgrown = false;
        return true;
    }
    // The last block of all has no scores to come beside its product.
    __device__ __forceinline__ void drain(Probabilities& used) {
        wgmma_wait_group<0>();
        settle_output();
        issue_output(used);
        finish_tile();
        if (p.lse != nullptr) hand_over({});  // says that there is no tile
        wgmma_wait_group<0>();
        value_in_use = -1;
        settle_output();
        if (lane_index() == 0) cp_async_bulk_wait_group_read<0>();
    }

    __device__ __forceinline__ void run() {
        if (!wait_for_tile()) return;
        begin_tile();
        if (kTurns && warpgroup == 0) bar_arrive(kTurn, 256);
        issue_scores();
        wgmma_wait_group<0>();
        use_scores(probabilities[0], true);
        softmax.outgrown = false;
#pragma unroll 1
        for (;;) {
            if (!step(probabilities[0], probabilities[1])) {
                drain(probabilities[0]);
                return;
            }
            if (!step(probabilities[1], probabilities[0])) {
                drain(probabilities[1]);
                return;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
attention_forward_sm90_bf16_d64_causal_w2_bk160_s2_qs2_op1_rlazy_t1_sdynamic_ph1_sm_90a(const __grid_constant__ Parameters p) {
    SharedRegions regions;
    Stages stages;
    stages.queries = regions.take(kQueryStages * QueryTile::kBytes);
    stages.keys = regions.take(kStages * KeyTile::kBytes);
    stages.values = regions.take(kStages * ValueTile::kBytes);
    stages.out = regions.take(kWarpgroups * 4 * kOutBytes);
    stages.sums = regions.take(kWarpgroups * kSumsBytes);
    stages.query_pipeline.barriers = regions.take(Pipeline<kQueryStages>::kBytes);
    stages.key_pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
    stages.value_pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
    stages.sums_pipelines.barriers = regions.take(kWarpgroups * Pipeline<1>::kBytes);
    stages.tiles = regions.take(kTiles * Tile::kBytes);
    if (thread_index() == 0) {
        stages.query_pipeline.initialise(1, kWarpgroups * 4);
        stages.key_pipeline.initialise(1, kWarpgroups);
        stages.value_pipeline.initialise(1, kWarpgroups);
        for (int i = 0; i < kWarpgroups; ++i) stages.sums_pipeline(i).initialise(4, 1);
        fence_mbarrier_init();
    }
    barrier_sync();
    const int warp = warp_index(), warpgroup = warp / 4;
    if (warpgroup == 0) {
        if constexpr (kMovesRegisters) setmaxnreg_dec<kProducerRegisters>();
        if (warp == 0) {
            if (thread_index() == 0) produce(p, stages);
        } else if (warp <= kWarpgroups && p.lse != nullptr) {
            write_lse(p, stages, warp - 1);
        }
    } else {
        if constexpr (kMovesRegisters) setmaxnreg_inc<kConsumerRegisters>();
        Consumer(p, stages, warpgroup - 1).run();
    }
}
