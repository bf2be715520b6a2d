// flash2_backward_bf16_d64_causal_bq64_bk128_w8_s2_bps1_gobatch_head_tile_sm_90a
//
// FlashAttention-2 backward (Dao 2023, algorithm 2): a block for each key tile, query tiles inside. Blocks add to dQ in any order.
//   delta = rowsum(dO * O) - d_lse and dQ = 0, before the loops (lines 3 and 4; d_lse, the gradient into lse, is not in the paper);
//   S = Q K^T (line 10), with the causal mask;  P = exp(scale * S - lse) (line 11);  dV += P^T dO (line 12);
//   dP = dO V^T (line 13);  dS = P * (dP - delta) (line 14);  dQ += dS K, in memory, atomic (line 15);  dK += dS^T Q (line 16);
//   at the end of a key tile dV and scale * dK are written (line 18), at the end of all scale * dQ.
// A block has 128 keys of a key/value head, and all queries of the query heads that share it.
//
//   problem     backward_bf16_d64_causal
//   config      block_q 64, block_kv 128, warps 8, stages 2, blocks_per_sm 1, grid_order batch_head_tile
//   target      sm_90a
//   _preprocess  <<<query_tiles * heads_q * batch, 256, 0 bytes>>>
//   launch       <<<key_tiles * heads_kv * batch, 256, 82944 bytes>>>
//   _postprocess <<<query_tiles * heads_q * batch, 128, 8192 bytes>>>
//   parts    atoms/ptx: types, register, index, shared_memory, shared_pair, barrier, cp_async, ldmatrix, mma_sync, cvt,
//              cvt_f32, ex2, mul, shfl_sync, vote_sync, red
//            tile/warp: shared_tile, exact_rows, load, load_tile, gemm, query_loader, column_group, score_gradients,
//              gradient_products, gradient_sum, epilogue, backward_beside, tile_pipeline, gradient_access
//            tile/common: shared_regions, tile_scheduler, sequences, score_chain, softmax_rows, lse, row_statistics

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

__device__ __forceinline__ void store_shared(SharedAddress address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
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

// ==== atoms/ptx/cp_async.cuh =========================================================================================

// Asynchronous copies from global to shared memory. PTX ISA, "cp.async" and its completion by groups (sm_80).

// Copies 16 bytes past L1; where `valid` is false it reads nothing and writes 16 zero bytes.
__device__ __forceinline__ void cp_async_16(SharedAddress destination, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(destination), "l"(__cvta_generic_to_global(source)), "r"(valid ? 16 : 0)
                 : "memory");
}

// Copies 16 bytes past L1.
__device__ __forceinline__ void cp_async_16(SharedAddress destination, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(__cvta_generic_to_global(source)) : "memory");
}

// Closes this thread's group of the copies issued since the last commit. A group may be empty.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's most recent groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ==== atoms/ptx/ldmatrix.cuh =========================================================================================

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

// ==== atoms/ptx/red.cuh ==============================================================================================

// Additions of fp32 numbers to global memory that return nothing. PTX ISA, "red"; .v4.f32: sm_90. Additions to one address have no fixed
// order, and each rounds. Subnormal numbers count as 0.

__device__ __forceinline__ void red_add_f32(float* address, float value) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "f"(value) : "memory");
}

// Adds four neighbouring numbers; `address` is a multiple of 16.
__device__ __forceinline__ void red_add_f32_v4(float* address, const float (&value)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(__cvta_generic_to_global(address)), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3])
                 : "memory");
}

using Element = Bf16;

// ---- what these kernels are specialised for ---------------------------------------------------------------------------

constexpr int kHeadDim = 64, kHeadDimV = 64;
constexpr int kBlockQ = 64, kBlockKv = 128, kWarps = 8, kStages = 2;
constexpr bool kCausal = true;
constexpr bool kVectors = true;  // whether four neighbouring numbers of d_q_sum are those of one lane

constexpr int kThreads = kWarps * 32, kBlocksPerSm = 1;
constexpr int kColumns = (kHeadDim + 15) / 16 * 16, kColumnsV = (kHeadDimV + 15) / 16 * 16;  // as the matrix product takes them
constexpr int kRowsPerWarp = kBlockKv / kWarps, kRowTiles = kRowsPerWarp / 16;               // keys of a warp
constexpr int kStepQ = kBlockQ < 64 ? 16 : 32;      // queries whose S and dP a warp has at once
constexpr int kGroupsDq = kWarps / (kBlockQ / 16);  // warps that share 16 rows of dQ: each has a part of their columns
constexpr int kRowThreads = 256, kRowBlocksPerSm = 1024 / kRowThreads;
constexpr int kSumThreads = kBlockQ * 2, kSumBlocksPerSm = 1;

// Strides in elements. lse and d_lse are [batch, heads_q, len_q], dense; d_lse may be null. scale_log2: softmax scale * log2(e).
// x_reciprocal: for a division by x (see divide). group: heads_q / heads_kv. row_lse (base 2), row_delta and row_shift are
// [batch, heads_q, query_tiles, kBlockQ], d_q_sum is [batch, heads_q, query_tiles, kBlockQ * kColumns], huge_tiles is [batch, heads_q,
// query_tiles]: whether row_shift is there, because some row of the tile needs it.
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
    int* huge_tiles;
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
    u64 heads_q_reciprocal;
    u64 group_reciprocal;
    u64 query_tiles_reciprocal;
    int heads_q;
    int len_q;
    int len_kv;
    int query_tiles;
    float scale_log2;
};
struct Parameters {
    const Element* q;
    const Element* k;
    const Element* v;
    const Element* d_out;
    const float* row_lse;
    const float* row_delta;
    const float* row_shift;
    const int* huge_tiles;
    float* d_q_sum;
    Element* d_k;
    Element* d_v;
    i64 q_batch;
    i64 q_head;
    i64 q_row;
    i64 k_batch;
    i64 k_head;
    i64 k_row;
    i64 v_batch;
    i64 v_head;
    i64 v_row;
    i64 d_out_batch;
    i64 d_out_head;
    i64 d_out_row;
    i64 d_k_batch;
    i64 d_k_head;
    i64 d_k_row;
    i64 d_v_batch;
    i64 d_v_head;
    i64 d_v_row;
    u64 heads_kv_reciprocal;
    u64 l2_group_heads_reciprocal;
    u64 l2_group_tiles_reciprocal;
    int heads_q;
    int heads_kv;
    int group;
    int len_q;
    int len_kv;
    int query_tiles;
    int key_tiles;
    int l2_group_heads;
    int l2_group_tiles;
    float scale;
    float scale_log2;
};
struct SumParameters {
    const float* d_q_sum;
    Element* d_q;
    i64 d_q_batch;
    i64 d_q_head;
    i64 d_q_row;
    u64 heads_q_reciprocal;
    u64 query_tiles_reciprocal;
    int heads_q;
    int len_q;
    int len_kv;
    int query_tiles;
    float scale;
};
// ---- tile operations --------------------------------------------------------------------------------------------------

// ==== tile/warp/shared_tile.cuh ======================================================================================

// A tile in shared memory and its swizzle: where element (row, column) lies.

// kRows x kColumns 16-bit elements, row-major in chunks of 16 bytes (8 elements). Within a row the chunks are permuted so that
// 8 rows of one chunk column, which is what ldmatrix reads at once, fall into 8 different groups of 4 banks. Rows that
// are 2^k * odd chunks long come back to the same bank group every 8 / 2^k rows, so an XOR of the k low bits is enough.
// Padding each row would do that too, but asynchronous copies of 128 bytes would then straddle two lines and take twice as long.
template <int kRows, int kColumns>
struct SharedTile {
    static_assert(kColumns % 16 == 0, "the matrix product reads 16 columns at a time");
    static constexpr int kRowCount = kRows, kChunks = kColumns / 8;
    static constexpr int kSwizzle = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
    static constexpr int kRowBytes = kChunks * 16;
    static constexpr int kBytes = kRows * kRowBytes;

    SharedAddress base;

    __device__ __forceinline__ SharedAddress at(int row, int chunk) const {
        const int group = chunk / kSwizzle * kSwizzle, permuted = chunk % kSwizzle ^ row / (8 / kSwizzle) % kSwizzle;
        return base + static_cast<u32>(row * kRowBytes + (group + permuted) * 16);
    }
    // From (row, chunk) to (row + rows, chunk + chunks): the same for all places if `rows` is a multiple of 8 and `chunks` one of kSwizzle.
    __device__ __forceinline__ static constexpr u32 distance(int rows, int chunks) { return rows * kRowBytes + chunks * 16; }
};

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

// ==== tile/warp/load.cuh =============================================================================================

// Copies of tiles between global and shared memory, 16 bytes a thread and step, rows and columns past the end left out.

// How kThreads threads partition the copy of a tile: kLanes neighbours take a row together, each one chunk, and the same chunk of every
// further group of kLanes. So a thread's addresses within a row are constants apart, however the chunks are permuted.
template <int kThreads, class Tile>
struct CopyPartition {
    static constexpr int kLanes = Tile::kSwizzle, kGroups = Tile::kChunks / kLanes;
    static constexpr int kRowsPerPass = kThreads / kLanes;
    static constexpr int kPasses = (Tile::kRowCount + kRowsPerPass - 1) / kRowsPerPass;
    int row, chunk;  // of this thread in the first pass

    __device__ __forceinline__ explicit CopyPartition(int thread) : row(thread / kLanes), chunk(thread % kLanes) {}

    __device__ __forceinline__ bool has_row(int pass) const {
        return Tile::kRowCount % kRowsPerPass == 0 || pass * kRowsPerPass + row < Tile::kRowCount;
    }
    __device__ __forceinline__ bool has_column(int group, int columns_valid) const {
        return (group + 1) * kLanes * 8 <= columns_valid || (group * kLanes + chunk) * 8 < columns_valid;
    }
    __device__ __forceinline__ SharedAddress address(const Tile& tile, int pass, int group) const {
        if (kRowsPerPass % 8 == 0) return tile.at(row, chunk) + Tile::distance(pass * kRowsPerPass, group * kLanes);
        return tile.at(pass * kRowsPerPass + row, chunk) + Tile::distance(0, group * kLanes);
    }
};

// Writes the tile's valid rows and columns to memory. `thread` is the caller's among the kThreads that do it.
template <int kThreads, int kColumnsValid, class Element, class Tile>
__device__ __forceinline__ void store_tile(Element* rows, i64 row_stride, int rows_valid, const Tile& tile, int thread) {
    const CopyPartition<kThreads, Tile> partition(thread);
    Element* destination = rows + partition.row * row_stride + partition.chunk * 8;
#pragma unroll
    for (int pass = 0; pass < partition.kPasses; ++pass) {
#pragma unroll
        for (int group = 0; group < partition.kGroups; ++group)
            if (partition.has_row(pass) && pass * partition.kRowsPerPass + partition.row < rows_valid &&
                partition.has_column(group, kColumnsValid))
                *reinterpret_cast<uint4*>(destination + group * partition.kLanes * 8) =
                    load_shared_v4(partition.address(tile, pass, group));
        destination += partition.kRowsPerPass * row_stride;
    }
}

// ==== tile/warp/load_tile.cuh ========================================================================================

// Copies of a tile from global to shared memory, where both its rows and its columns may reach past the end of what there is.

// Starts the copy of the tile whose first element is `*source`. The caller's kThreads threads take part and commit the group. Elements from
// row `rows_valid` or column `columns_valid` on are not read, and the tile holds zeros there. Each row is read in chunks of 8 elements: the
// last one may reach beyond `columns_valid`.
template <int kThreads, class Tile, class Element>
__device__ __forceinline__ void load_tile(const Tile& tile, const Element* source, i64 row_stride, int rows_valid, int columns_valid) {
    const CopyPartition<kThreads, Tile> partition(thread_index());
    const Element* from = source + partition.row * row_stride + partition.chunk * 8;
#pragma unroll
    for (int pass = 0; pass < partition.kPasses; ++pass) {
        const bool valid = pass * partition.kRowsPerPass + partition.row < rows_valid;
#pragma unroll
        for (int group = 0; group < partition.kGroups; ++group)
            if (partition.has_row(pass))
                cp_async_16(partition.address(tile, pass, group), from + group * partition.kLanes * 8,
                            valid && partition.has_column(group, columns_valid));
        from += partition.kRowsPerPass * row_stride;
        launder(from);  // or the compiler would keep the addresses of all passes in registers of their own
    }
}

// ==== tile/warp/gemm.cuh =============================================================================================

// The two matrix products of attention, for one warp: S = Q K^T and O += P V. In the backward pass the first one computes S^T = K Q^T and
// dP^T = V dO^T, with keys as rows.
//
// A warp owns kRowTiles * 16 rows. Accumulators are arrays [row tile][column tile of 8][4], laid out as mma_sync.cuh
// says: [0], [1] belong to row lane/4, [2], [3] to row lane/4 + 8.

// Where a lane finds its part of an operand in a tile that is kColumns wide, for ldmatrix. Of the left operand (Q) and of a transposed one
// (V): lanes 0 to 15 point at 16 rows, lanes 16 to 31 at the same rows one chunk further. Of the right operand (K): the second and the
// third of the four matrices swapped. An operand is two chunks wide; the offsets within a
// group of chunks are held in registers, and everything else is constants away or the same for all lanes.
template <int kColumns>
struct LaneOffsets {
    using Rows = SharedTile<16, kColumns>;
    static constexpr int kOffsets = Rows::kSwizzle / 2;
    u32 offset[kOffsets];
    // From the address in Q or V to that in K, whose four matrices are (keys, d), (keys, d + 8), (keys + 8, d), (keys + 8, d + 8) in this
    // order. One difference serves all offsets: row % 8 is the same in both, and the chunks differ in bit 0 alone, which i * 2 leaves.
    u32 to_keys;

    __device__ __forceinline__ LaneOffsets() {
        const int lane = lane_index();
        const Rows rows{0};
#pragma unroll
        for (int i = 0; i < kOffsets; ++i) {
            offset[i] = rows.at(lane % 16, lane / 16 ^ i * 2);
            launder(offset[i]);
        }
        to_keys = rows.at(lane / 16 * 8 + lane % 8, lane / 8 % 2) - offset[0];
        launder(to_keys);
    }
    __device__ __forceinline__ SharedAddress at(SharedAddress tile, int rows, int chunks) const {
        return offset[chunks / 2 % kOffsets] + tile + Rows::distance(rows, chunks / Rows::kSwizzle * Rows::kSwizzle);
    }
};

// Those for Q and K, and for V: one set where they are equally wide.
template <int kColumns, int kColumnsV>
struct OperandOffsets {
    LaneOffsets<kColumns> for_keys;
    LaneOffsets<kColumnsV> for_values;
    __device__ __forceinline__ const LaneOffsets<kColumns>& keys() const { return for_keys; }
    __device__ __forceinline__ const LaneOffsets<kColumnsV>& values() const { return for_values; }
};
template <int kColumns>
struct OperandOffsets<kColumns, kColumns> {
    LaneOffsets<kColumns> for_all;
    __device__ __forceinline__ const LaneOffsets<kColumns>& keys() const { return for_all; }
    __device__ __forceinline__ const LaneOffsets<kColumns>& values() const { return for_all; }
};

// Q read from shared memory at each use: costs bandwidth, saves registers. `rows` are the warp's.
template <int kColumns>
struct LeftInShared {
    const LaneOffsets<kColumns>& offsets;
    SharedAddress rows;

    __device__ __forceinline__ void fragment(u32 (&a)[4], int row_tile, int k) const {  // k: 16 columns of the contraction
        ldmatrix_x4(a, offsets.at(rows, row_tile * 16, k * 2));
    }
};

// S = Q K^T for the column tiles [first, first + kCount), an even number of them. The tile at `keys` holds one key a row.
template <class Element, int kCount, class Query, int kRowTiles, int kKeyTiles, int kColumns>
__device__ __forceinline__ void gemm_scores(float (&S)[kRowTiles][kKeyTiles][4], int first, const Query& query,
                                            SharedAddress keys, const LaneOffsets<kColumns>& offsets) {
    const SharedAddress own_keys = keys + offsets.to_keys;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = first; j < first + kCount; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) S[i][j][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
        u32 a[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) query.fragment(a[i], i, k);
#pragma unroll
        for (int j = first; j < first + kCount; j += 2) {
            u32 b[4];  // (keys 0-7, d 0-7), (keys 0-7, d 8-15), (keys 8-15, d 0-7), (keys 8-15, d 8-15)
            ldmatrix_x4(b, offsets.at(own_keys, j * 8, k * 2));
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_sync_m16n8k16<Element>(S[i][j], a[i], b[0], b[1]);
                mma_sync_m16n8k16<Element>(S[i][j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// ==== tile/warp/query_loader.cuh =====================================================================================

// What a block of the generic backward kernel reads of its queries, tile by tile: Q, dO, and the statistics of their rows.

// A stage of shared memory for one query tile.
template <class QueryTile, class GradientTile>
struct QueryStage {
    static constexpr int kStatisticsBytes = QueryTile::kRowCount * 4;
    static constexpr int kBytes = QueryTile::kBytes + GradientTile::kBytes + 2 * kStatisticsBytes;
    SharedAddress base;

    __device__ __forceinline__ SharedAddress q() const { return base; }
    __device__ __forceinline__ SharedAddress d_out() const { return base + QueryTile::kBytes; }
    __device__ __forceinline__ SharedAddress row_lse() const { return d_out() + GradientTile::kBytes; }
    __device__ __forceinline__ SharedAddress row_delta() const { return row_lse() + kStatisticsBytes; }
};

// Loads the tiles of all query heads that share the block's keys, one head after the other.
template <class QueryTile, class GradientTile, int kThreads, int kHeadDim, int kHeadDimV, class Sequences, class Parameters>
struct QueryLoader {
    static constexpr int kBlockQ = QueryTile::kRowCount;
    const Parameters& p;
    const Sequences& sequences;
    const QueryTileRange& tiles;
    int batch, head, tile, left;  // of the tile that comes next; left: tiles
    int huge = 0;                 // whether the tile that was loaded last has huge rows

    __device__ __forceinline__ QueryLoader(const Parameters& p, const Sequences& sequences, const QueryTileRange& tiles, int batch,
                                           int head_kv)
        : p(p), sequences(sequences), tiles(tiles), batch(batch), head(head_kv * p.group), tile(tiles.begin),
          left(tiles.count() * p.group) {}

    // The caller commits the group.
    __device__ __forceinline__ void load_next(const QueryStage<QueryTile, GradientTile>& stage) {
        if (left-- <= 0) return;
        const int first_query = tile * kBlockQ, queries = sequences.len_q(batch) - first_query;
        const i64 tile_index = sequences.first_tile(batch, head) + tile, row = tile_index * kBlockQ;
        huge = p.huge_tiles[tile_index];
        const Strides of_q{p.q_batch, p.q_head, p.q_row}, of_d_out{p.d_out_batch, p.d_out_head, p.d_out_row};
        load_tile<kThreads>(QueryTile{stage.q()}, sequences.query_row(p.q, of_q, batch, head, first_query), p.q_row, queries, kHeadDim);
        load_tile<kThreads>(GradientTile{stage.d_out()}, sequences.query_row(p.d_out, of_d_out, batch, head, first_query), p.d_out_row,
                            queries, kHeadDimV);
        const int thread = thread_index();  // row_delta lies behind row_lse
        if (thread < kBlockQ / 4) cp_async_16(stage.row_lse() + thread * 16, p.row_lse + row + thread * 4);
        else if (thread < kBlockQ / 2) cp_async_16(stage.row_lse() + thread * 16, p.row_delta + row + thread * 4 - kBlockQ);
        if (++tile == tiles.end) tile = tiles.begin, ++head;
    }
};

// ==== tile/warp/column_group.cuh =====================================================================================

// Products of which a warp computes only some columns: groups of warps divide them, and share what lies to the left of the product.

// The columns that a warp owns of an operand that is kColumns wide, which kGroups warps divide: every kGroups-th pair of chunks, which
// are 16 columns. Thus a lane finds them all by a few offsets and constants, as LaneOffsets in gemm.cuh does. The rows of the operand are
// the inner dimension of the product.
template <int kColumns, int kGroups>
struct ColumnGroup {
    using Rows = SharedTile<16, kColumns>;
    static constexpr int kPairs = kColumns / 16, kOwn = (kPairs + kGroups - 1) / kGroups;  // column pairs: all, and at most of a warp
    static constexpr int kPeriod = Rows::kSwizzle / 2;                                      // pairs after which the permutation comes back
    static constexpr int kOffsets = kPeriod > kGroups ? kPeriod / kGroups : 1;
    int group;
    u32 offset[kOffsets];

    // A warp that owns all columns finds them by the same offsets as `lanes`: they share registers.
    __device__ __forceinline__ ColumnGroup(const LaneOffsets<kColumns>& lanes, int group) : group(group) {
        const int lane = lane_index();
#pragma unroll
        for (int i = 0; i < kOffsets; ++i)
            offset[i] = kGroups == 1 ? lanes.offset[i] : Rows{0}.at(lane % 16, pair(i) * 2 + lane / 16);
    }
    __device__ __forceinline__ int pair(int own) const { return own * kGroups + group; }
    __device__ __forceinline__ bool has(int own) const { return own < kPairs / kGroups || pair(own) < kPairs; }
    __device__ __forceinline__ SharedAddress at(SharedAddress tile, int rows, int own) const {
        return offset[own % kOffsets] + tile + Rows::distance(rows, own / kOffsets * kOffsets * kGroups * 2);
    }
};

// product += A B for 16 rows of B, from row `row` of the tile at `rows` on: the columns that the warp owns, two column tiles of 8 a pair.
template <class Element, int kRowTiles, int kTiles, int kColumns, int kGroups>
__device__ __forceinline__ void gemm_columns(float (&product)[kRowTiles][kTiles][4], const u32 (&a)[kRowTiles][4], SharedAddress rows,
                                             int row, const ColumnGroup<kColumns, kGroups>& columns) {
    static_assert(kTiles == ColumnGroup<kColumns, kGroups>::kOwn * 2, "two column tiles a pair");
#pragma unroll
    for (int own = 0; own < kTiles / 2; ++own) {
        if (!columns.has(own)) continue;
        u32 b[4];  // rows 0-7 and rows 8-15 of columns 0-7, then the same of columns 8-15, each transposed
        ldmatrix_x4_trans(b, columns.at(rows, row, own));
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            mma_sync_m16n8k16<Element>(product[i][own * 2], a[i], b[0], b[1]);
            mma_sync_m16n8k16<Element>(product[i][own * 2 + 1], a[i], b[2], b[3]);
        }
    }
}

// Rounds a warp's rows, from `first_row` of the tile on, of the columns that it owns, and writes them to the tile.
template <class Element, class Tile, int kRowTiles, int kTiles, int kColumns, int kGroups>
__device__ __forceinline__ void store_columns(const Tile& tile, int first_row, const float (&product)[kRowTiles][kTiles][4], float scale,
                                              const ColumnGroup<kColumns, kGroups>& columns) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
                if (columns.has(j / 2))
                    store_shared(tile.at(first_row + i * 16 + h * 8 + lane / 4, columns.pair(j / 2) * 2 + j % 2) + lane % 4 * 4,
                                 cvt_rn_x2<Element>(product[i][j][h * 2] * scale, product[i][j][h * 2 + 1] * scale));
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

// Writes such an operand to a tile [key][query], 16 queries from `first_query` on.
template <int kRowTiles, class Tile>
__device__ __forceinline__ void store_operand(const Tile& tile, int first_key, int first_query, const u32 (&a)[kRowTiles][4]) {
    int lane = lane_index();
    launder(lane);  // or the compiler would keep the addresses of all queries of a tile in registers
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r)
            store_shared(tile.at(first_key + i * 16 + r % 2 * 8 + lane / 4, first_query / 8 + r / 2) + lane % 4 * 4, a[i][r]);
}

// ==== tile/warp/gradient_products.cuh ================================================================================

// Products of P^T and dS^T tiles in shared memory, which have a row for each key and a column for each query.

// product += A B for the 16 queries of a slice: A is a warp's rows of P^T or dS^T, and B has a row for each query.
template <class Element, int kRowTiles, int kTiles, int kBlockQ, int kColumns, int kGroups>
__device__ __forceinline__ void gemm_columns(float (&product)[kRowTiles][kTiles][4], const LeftInShared<kBlockQ>& a, int slice,
                                             SharedAddress rows, const ColumnGroup<kColumns, kGroups>& columns) {
    u32 fragments[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) a.fragment(fragments[i], i, slice);
    gemm_columns<Element>(product, fragments, rows, slice * 16, columns);
}

// Rows of dS, which are columns of a tile of dS^T: kRowTiles * 16 queries from row tile `row_tile` on, as this lane loads them transposed.
template <class ScoreTile, int kRowTiles>
struct TransposedRows {
    SharedAddress rows[kRowTiles];

    __device__ __forceinline__ TransposedRows(const ScoreTile& tile, int row_tile) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
            rows[i] = tile.at(lane_index() / 16 * 8 + lane_index() % 8, (row_tile + i) * 2 + lane_index() / 8 % 2);
    }
    __device__ __forceinline__ void fragments(u32 (&a)[kRowTiles][4], int slice) const {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) ldmatrix_x4_trans(a[i], rows[i] + ScoreTile::distance(slice * 16, 0));
    }
};

// dQ = dS K over all keys of a block.
template <class Element, class ScoreTile, int kRowTiles, int kTiles, int kColumns, int kGroups>
__device__ __forceinline__ void gemm_over_keys(float (&dQ)[kRowTiles][kTiles][4], const TransposedRows<ScoreTile, kRowTiles>& dS,
                                               SharedAddress keys, const ColumnGroup<kColumns, kGroups>& columns) {
#pragma unroll
    for (int slice = 0; slice < ScoreTile::kRowCount / 16; ++slice) {
        u32 a[kRowTiles][4];
        dS.fragments(a, slice);
        gemm_columns<Element>(dQ, a, keys, slice * 16, columns);
    }
}

// ==== tile/warp/gradient_sum.cuh =====================================================================================

// dQ on its way through global memory: fp32 sums, to which the blocks of all key tiles add. The sums of a query tile lie as warps hold
// them: 128 numbers for each product of 16 rows x 8 columns, products in row-major order; within one lane by lane (kVectors) or register by
// register, so that the lanes of a warp touch neighbouring words.

// Where the accumulators of one 16 x 8 product lie, from the first of the query tile.
template <int kColumns>
__device__ __forceinline__ constexpr int gradient_offset(int row_tile, int column_tile) {
    return (row_tile * (kColumns / 8) + column_tile) * 128;
}

// Adds one product's accumulators to those at `d_q_sum`.
template <bool kVectors>
__device__ __forceinline__ void add_gradient(float* d_q_sum, const float (&d)[4]) {
    if (kVectors) {
        red_add_f32_v4(d_q_sum + lane_index() * 4, d);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) red_add_f32(d_q_sum + e * 32 + lane_index(), d[e]);
    }
}

// Reads one product's accumulators back, times `scale`.
template <bool kVectors>
__device__ __forceinline__ void load_gradient(float (&d)[4], const float* d_q_sum, float scale) {
    if (kVectors) {
        const uint4 four = *reinterpret_cast<const uint4*>(d_q_sum + lane_index() * 4);
        const u32 bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) d[e] = __uint_as_float(bits[e]) * scale;
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) d[e] = d_q_sum[e * 32 + lane_index()] * scale;
    }
}

// ==== tile/warp/epilogue.cuh =========================================================================================

// From a warp's registers to memory: the output, through shared memory, and lse.

// Rounds the warp's rows and writes the valid ones to memory, by way of `tile`, which no other warp uses.
template <int kColumnsValid, class Element, int kRowTiles, int kOutTiles>
__device__ __forceinline__ void store_output(Element* rows, i64 row_stride, int rows_valid, const float (&out)[kRowTiles][kOutTiles][4],
                                             const SharedTile<kRowTiles * 16, kOutTiles * 8>& tile) {
    int lane = lane_index();
    launder(lane);
    barrier_warp_sync();  // all lanes have read what the tile held before
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int j = 0; j < kOutTiles; ++j)
                store_shared(tile.at(lane / 4, j) + tile.distance(i * 16 + h * 8, 0) + lane % 4 * 4,
                             cvt_rn_x2<Element>(out[i][j][h * 2], out[i][j][h * 2 + 1]));
    barrier_warp_sync();
    store_tile<32, kColumnsValid>(rows, row_stride, rows_valid, tile, lane);
}

// ==== tile/warp/backward_beside.cuh ==================================================================================

// The two kernels beside the main one of the generic backward pass, which have a block for each query tile of each head: one before it
// writes what it needs of each query and zeroes the sums of dQ, one after it scales and rounds these.

struct QueryTileWork {
    int batch, head, first_query;
    i64 index;  // among the query tiles of all heads

    template <int kBlockQ, class Parameters>
    __device__ __forceinline__ static QueryTileWork find(const Parameters& p, const DenseSequences& sequences) {
        const int heads_before = divide(block_index(), p.query_tiles_reciprocal), batch = divide(heads_before, p.heads_q_reciprocal);
        const int head = heads_before - batch * p.heads_q, tile = block_index() - heads_before * p.query_tiles;
        return {batch, head, tile * kBlockQ, sequences.first_tile(batch, head) + tile};
    }
};

// row_lse, row_delta, row_shift; d_q_sum = 0. clear(tile) zeroes what else the main kernel counts up of a query tile.
template <class Element, int kThreads, int kBlockQ, int kHeadDim, int kHeadDimV, int kColumns, class Parameters, class Chain, class Clear>
__device__ __forceinline__ void preprocess(const Parameters& p, const Chain& chain, const Clear& clear) {
    const DenseSequences sequences{p.len_q, p.len_kv, p.heads_q, p.query_tiles};
    const auto [batch, head, first_query, tile] = QueryTileWork::find<kBlockQ>(p, sequences);
    const int len_kv = sequences.len_kv(batch), queries = sequences.len_q(batch) - first_query;
    const Strides of_out{p.out_batch, p.out_head, p.out_row}, of_d_out{p.d_out_batch, p.d_out_head, p.d_out_row};
    const Element* out = sequences.query_row(p.out, of_out, batch, head, first_query);
    const Element* d_out = sequences.query_row(p.d_out, of_d_out, batch, head, first_query);
    const i64 row = sequences.lse_offset(batch, head) + first_query;
    const float *lse = p.lse + row, *d_lse = p.d_lse == nullptr ? nullptr : p.d_lse + row;
    float *row_lse = p.row_lse + tile * kBlockQ, *row_delta = p.row_delta + tile * kBlockQ, *row_shift = p.row_shift + tile * kBlockQ;
    write_zeros<kThreads, kBlockQ * kColumns>(p.d_q_sum + tile * (kBlockQ * kColumns));
    clear(tile);
    write_row_statistics<kThreads, kBlockQ, kHeadDimV>(row_lse, row_delta, out, p.out_row, d_out, p.d_out_row, lse, d_lse, queries);

    const bool huge = any_huge_row<kBlockQ>(lse, queries);
    if (thread_index() == 0) p.huge_tiles[tile] = huge;
    if (!unlikely(huge || len_kv <= kFewKeys)) return;
    barrier_sync();  // row_lse and row_delta are written: those of some rows are replaced
    write_exact_rows<kThreads, kBlockQ, kHeadDim, kHeadDimV>(row_lse, row_delta, row_shift, p, sequences, batch, head, first_query, huge,
                                                             chain);
}

// dQ = scale * d_q_sum. A warp has 16 rows of the block's query tile.
template <class Element, int kThreads, int kBlockQ, int kHeadDim, int kColumns, bool kVectorReductions, class Parameters>
__device__ __forceinline__ void postprocess(const Parameters& p) {
    using SumTile = SharedTile<16, kColumns>;  // of a warp
    const DenseSequences sequences{p.len_q, p.len_kv, p.heads_q, p.query_tiles};
    const auto [batch, head, first_query, tile] = QueryTileWork::find<kBlockQ>(p, sequences);
    const int warp = warp_index(), first_row = first_query + warp * 16;
    const float* sums = p.d_q_sum + tile * (kBlockQ * kColumns);
    SharedRegions regions;
    const SharedAddress tiles = regions.take(kThreads / 32 * SumTile::kBytes);

    float dQ[1][kColumns / 8][4];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) load_gradient<kVectorReductions>(dQ[0][j], sums + gradient_offset<kColumns>(warp, j), p.scale);
    const Strides of_d_q{p.d_q_batch, p.d_q_head, p.d_q_row};
    Element* rows = sequences.query_row(p.d_q, of_d_q, batch, head, first_row);
    store_output<kHeadDim>(rows, p.d_q_row, sequences.len_q(batch) - first_row, dQ, SumTile{tiles + warp * SumTile::kBytes});
}

// ==== tile/warp/tile_pipeline.cuh ====================================================================================

// The loop of a matrix product over its tiles: while one is used, the next ones are on their way.

// Calls use(tile, stage) for each of `tiles` tiles in order. Before that load(tile, stage) has started their copies, up to kStages - 1
// tiles ahead. `ring` is the first of kStages stages of `stage_bytes` each. Copies that the caller started before belong to the first
// tile's group.
template <int kStages, class Load, class Use>
__device__ __forceinline__ void for_each_tile(int tiles, SharedAddress ring, int stage_bytes, const Load& load, const Use& use) {
#pragma unroll
    for (int tile = 0; tile < kStages - 1; ++tile) {
        if (tile < tiles) load(tile, ring + tile * stage_bytes);
        cp_async_commit_group();
    }
    for (int tile = 0; tile < tiles; ++tile) {
        cp_async_wait_group<kStages - 2>();
        barrier_sync();  // every thread's copies of this tile have landed, and nobody reads the stage of the tile before any more
        const int next = tile + kStages - 1;
        if (next < tiles) load(next, ring + next % kStages * stage_bytes);
        cp_async_commit_group();  // a group without copies where no tile is left, so that their number stays the same
        use(tile, ring + tile % kStages * stage_bytes);
    }
}

// ==== tile/warp/gradient_access.cuh ==================================================================================

// How a warp reaches its part of the sums of dQ (gradient_sum.cuh), product by product. The kernel says what it does there.

// Calls move(d, at) for each product of 16 rows x 8 columns of a warp: its accumulators, and where they lie. The warp has rows of the query
// tile at `d_q_sum`, from row tile `row_tile` on, and the columns that it owns.
template <int kRowTiles, int kTiles, int kColumns, int kGroups, class Move>
__device__ __forceinline__ void for_each_product(float (&dQ)[kRowTiles][kTiles][4], float* d_q_sum, int row_tile,
                                                 const ColumnGroup<kColumns, kGroups>& columns, const Move& move) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
            if (columns.has(j / 2)) move(dQ[i][j], d_q_sum + gradient_offset<kColumns>(row_tile + i, columns.pair(j / 2) * 2 + j % 2));
}

using QueryTile = SharedTile<kBlockQ, kColumns>;
using GradientTile = SharedTile<kBlockQ, kColumnsV>;  // of dO
using KeyTile = SharedTile<kBlockKv, kColumns>;
using ValueTile = SharedTile<kBlockKv, kColumnsV>;
using ScoreTile = SharedTile<kBlockKv, kBlockQ>;  // of dS^T: a row a key
using ColumnsDq = ColumnGroup<kColumns, kGroupsDq>;
using Stage = QueryStage<QueryTile, GradientTile>;
using Loader = QueryLoader<QueryTile, GradientTile, kThreads, kHeadDim, kHeadDimV, DenseSequences, Parameters>;

// ---- delta = rowsum(dO * O) - d_lse; dQ = 0 ---------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kRowThreads, kRowBlocksPerSm)
flash2_backward_bf16_d64_causal_bq64_bk128_w8_s2_bps1_gobatch_head_tile_sm_90a_preprocess(const __grid_constant__ RowParameters p) {
    const auto nothing_else = [](i64) {};
    preprocess<Element, kRowThreads, kBlockQ, kHeadDim, kHeadDimV, kColumns>(p, make_chain<kCausal>(p.len_q, p.len_kv), nothing_else);
}

// ---- dK, dV; dQ += dS K -----------------------------------------------------------------------------------------------
// (1: n, 2: m) stands for line n of FlashAttention's algorithm 4, and line m of FlashAttention-2's algorithm 2.

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
flash2_backward_bf16_d64_causal_bq64_bk128_w8_s2_bps1_gobatch_head_tile_sm_90a(const __grid_constant__ Parameters p) {
    const WorkTile work = find_work_tile(block_index(), TileScheduler::of(p, p.key_tiles), p.heads_kv, p.heads_kv_reciprocal);
    int batch = work.batch, head_kv = work.head;
    const int warp = warp_index();
    const DenseSequences sequences{p.len_q, p.len_kv, p.heads_q, p.query_tiles};
    const auto chain = make_chain<kCausal>(p.len_q, p.len_kv);

    SharedRegions regions;
    const KeyTile key_tile{regions.take(KeyTile::kBytes)};
    const ValueTile value_tile{regions.take(ValueTile::kBytes)};
    const ScoreTile dS_tile{regions.take(ScoreTile::kBytes)};
    const SharedAddress ring = regions.take(kStages * Stage::kBytes);

    const int first_row = warp * kRowsPerWarp, row_tile_dq = warp / kGroupsDq;  // where this warp's keys and its rows of dQ begin
    const OperandOffsets<kColumns, kColumnsV> offsets;
    const ColumnGroup<kColumns, 1> key_columns(offsets.keys(), 0);
    const ColumnGroup<kColumnsV, 1> value_columns(offsets.values(), 0);
    const ColumnsDq query_columns(offsets.keys(), warp % kGroupsDq);
    const LeftInShared<kColumns> K{offsets.keys(), key_tile.base + first_row * KeyTile::kRowBytes};
    const LeftInShared<kColumnsV> V{offsets.values(), value_tile.base + first_row * ValueTile::kRowBytes};
    const TransposedRows<ScoreTile, 1> dS_rows(dS_tile, row_tile_dq);

    auto visit_keys = [&](int index) {
        const int first_key = index * kBlockKv, keys = p.len_kv - first_key;
        const Element* k = sequences.key_row(p.k, {p.k_batch, p.k_head, p.k_row}, batch, head_kv, first_key);
        const Element* v = sequences.key_row(p.v, {p.v_batch, p.v_head, p.v_row}, batch, head_kv, first_key);
        load_tile<kThreads>(key_tile, k, p.k_row, keys, kHeadDim);  // (1: 7, 2: 6)
        load_tile<kThreads>(value_tile, v, p.v_row, keys, kHeadDimV);
        float dK[kRowTiles][kColumns / 8][4] = {}, dV[kRowTiles][kColumnsV / 8][4] = {};  // (1: 8, 2: 7)

        // The loop visits the query tiles that see any of these keys, one query head of the group after the other.
        const QueryTileRange tiles = chain.query_tiles<kBlockQ>(first_key, first_key + kBlockKv, p.len_q);
        Loader queries(p, sequences, tiles, batch, head_kv);
        auto load_queries = [&](int, SharedAddress to) { queries.load_next(Stage{to}); };  // Q, dO, row_lse, row_delta (1: 10, 2: 9)
        int head = head_kv * p.group, tile = tiles.begin;
        auto visit_queries = [&](int, SharedAddress stage) {
            const Stage here{stage};
            const i64 tile_index = sequences.first_tile(batch, head) + tile;  // among those of all heads
            const bool huge = p.huge_tiles[tile_index] != 0;
#pragma unroll 1  // mixed with each other, steps would need more registers
            for (int first = 0; first < kBlockQ; first += kStepQ) {
                float S[kRowTiles][kStepQ / 8][4], dP[kRowTiles][kStepQ / 8][4];
                const SharedAddress q = here.q() + first * QueryTile::kRowBytes, d_out = here.d_out() + first * GradientTile::kRowBytes;
                gemm_scores<Element, kStepQ / 8>(S, 0, K, q, offsets.keys());  // S^T = K Q^T (1: 11, 2: 10)
                if (tiles.needs_mask(tile)) mask_transposed(S, first_key + first_row, tile * kBlockQ + first, chain);  // (1: 12)
                if (unlikely(huge)) shift_transposed(S, p.row_shift + tile_index * kBlockQ + first);
                exponentiate(S, p.scale_log2, here.row_lse() + first * 4);  // S becomes P^T = exp(scale * S^T - lse) (1: 13, 2: 11)
                gemm_scores<Element, kStepQ / 8>(dP, 0, V, d_out, offsets.values());  // dP^T = V dO^T (1: 17, 2: 13)
                differentiate(dP, S, here.row_delta() + first * 4);  // dP becomes dS^T = P^T * (dP^T - delta) (1: 20, 2: 14)
#pragma unroll
                for (int slice = 0; slice < kStepQ / 16; ++slice) {
                    u32 P[kRowTiles][4], dS[kRowTiles][4];
                    round_to_operand<Element>(P, S, slice);
                    round_to_operand<Element>(dS, dP, slice);
                    store_operand(dS_tile, first_row, first + slice * 16, dS);
                    gemm_columns<Element>(dV, P, d_out, slice * 16, value_columns);  // dV += P^T dO (1: 16, 2: 12)
                    gemm_columns<Element>(dK, dS, q, slice * 16, key_columns);       // dK += dS^T Q (1: 22, 2: 16)
                }
            }
            float* sums = p.d_q_sum + tile_index * (kBlockQ * kColumns);
            float dQ[1][ColumnsDq::kOwn * 2][4] = {};
            barrier_sync();  // dS of all warps is here
            gemm_over_keys<Element>(dQ, dS_rows, key_tile.base, query_columns);  // dQ += dS K (1: 21, 2: 15)
            for_each_product(dQ, sums, row_tile_dq, query_columns, [](float (&d)[4], float* at) { add_gradient<kVectors>(at, d); });
            if (++tile == tiles.end) tile = tiles.begin, ++head;
        };
        for_each_tile<kStages>(tiles.count() * p.group, ring, Stage::kBytes, load_queries, visit_queries);  // (1: 9, 2: 8)

        cp_async_wait_group<0>();  // without a query tile K and V may still be arriving
        barrier_sync();            // nobody reads K and V any more: dK and dV take their places
        store_columns<Element>(key_tile, first_row, dK, p.scale, key_columns);
        store_columns<Element>(value_tile, first_row, dV, 1.0f, value_columns);
        barrier_sync();  // dK and dV of all warps are here
        Element* d_k = sequences.key_row(p.d_k, {p.d_k_batch, p.d_k_head, p.d_k_row}, batch, head_kv, first_key);
        Element* d_v = sequences.key_row(p.d_v, {p.d_v_batch, p.d_v_head, p.d_v_row}, batch, head_kv, first_key);
        store_tile<kThreads, kHeadDim>(d_k, p.d_k_row, keys, key_tile, thread_index());  // (1: 24, 2: 18)
        store_tile<kThreads, kHeadDimV>(d_v, p.d_v_row, keys, value_tile, thread_index());
    };
    visit_keys(p.key_tiles - 1 - work.tile);  // (2: 5): the first keys first, which most queries see
}

// ---- dQ = scale * dQ, rounded -----------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kSumThreads, kSumBlocksPerSm)
flash2_backward_bf16_d64_causal_bq64_bk128_w8_s2_bps1_gobatch_head_tile_sm_90a_postprocess(const __grid_constant__ SumParameters p) {
    postprocess<Element, kSumThreads, kBlockQ, kHeadDim, kColumns, kVectors>(p);
}
