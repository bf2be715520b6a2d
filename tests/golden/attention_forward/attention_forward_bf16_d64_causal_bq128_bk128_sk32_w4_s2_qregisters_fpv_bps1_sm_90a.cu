// attention_forward_bf16_d64_causal_bq128_bk128_sk32_w4_s2_qregisters_fpv_bps1_sm_90a
//
// Attention forward, FlashAttention-2 (Dao 2023), algorithm 1:
//   S = Q K^T, causal mask,  out = softmax(scale * S) V,  lse = log(sum(exp(scale * S))) for each row.
// A block computes 128 rows of O, 32 in a warp, in steps of 32 keys.
//
//   problem  bf16_d64_causal
//   config   block_q 128, block_kv 128, step_kv 32, warps 4, stages 2, query registers, first_product pv, blocks_per_sm
//            1
//   target   sm_90a
//   launch   <<<ceil(len_q / 128) * heads_q * batch, 128, 86016 bytes>>>
//   parts    atoms/ptx: types, register, index, shared_memory, barrier, cp_async, ldmatrix, mma_sync, cvt, ex2, mul,
//              shfl_sync, vote_sync
//            tile/warp: shared_tile, load, key_value_reader, gemm, softmax, epilogue
//            tile/common: shared_regions, tile_scheduler, sequences, score_chain, mask, softmax_rows, lse, settled_row

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

using Element = Bf16;

// ---- what this kernel is specialised for ------------------------------------------------------------------------------

constexpr int kHeadDim = 64, kHeadDimV = 64;
constexpr int kBlockQ = 128, kBlockKv = 128, kStepKv = 32;
constexpr int kWarps = 4, kStages = 2, kBlocksPerSm = 1;
constexpr bool kCausal = true;

constexpr int kThreads = kWarps * 32, kSteps = kBlockKv / kStepKv, kRowsPerWarp = kBlockQ / kWarps, kRowTiles = kRowsPerWarp / 16;
constexpr int kColumns = (kHeadDim + 15) / 16 * 16, kColumnsV = (kHeadDimV + 15) / 16 * 16;  // as the matrix product takes them

// Strides in elements. lse: [batch, heads_q, len_q], dense, or null. scale_log2: softmax scale * log2(e), more than 0; ln2_hi + ln2_lo:
// scale / scale_log2, about ln 2. x_reciprocal: for a division by x (see divide). group: heads_q / heads_kv. query_tiles: of a head.
struct Parameters {
    const Element* q;
    const Element* k;
    const Element* v;
    Element* out;
    float* lse;
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
    u64 heads_q_reciprocal;
    u64 group_reciprocal;
    u64 l2_group_heads_reciprocal;
    u64 l2_group_tiles_reciprocal;
    int heads_q;
    int len_q;
    int len_kv;
    int query_tiles;
    int l2_group_heads;
    int l2_group_tiles;
    float scale_log2;
    float ln2_hi;
    float ln2_lo;
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

// Copies the rows of a sequence to tiles, from the last to the first: it holds this thread's place in the tile that comes next, and
// goes backwards pass by pass, so that one stride is all it needs. The caller commits the groups. Columns from kColumnsValid on
// are not read: tiles hold zeros there.
template <class Tile, int kThreads, int kColumnsValid, class Element>
struct TileReader {
    using Passes = CopyPartition<kThreads, Tile>;
    Passes partition;
    const Element* source;
    i64 row_stride;

    // `rows` points at the first row of the first tile to be copied.
    __device__ __forceinline__ TileReader(const Element* rows, i64 row_stride)
        : partition(thread_index()),
          source(rows + (partition.row + (Passes::kPasses - 1) * Passes::kRowsPerPass) * row_stride + partition.chunk * 8),
          row_stride(row_stride) {}

    // Starts the copy of a tile of which only rows [begin, end) are read; it holds zeros in the others.
    __device__ __forceinline__ void load(const Tile& tile, int begin, int end) {
        pass_by_pass([&](int pass, int group, const Element* from) {
            const int row = pass * Passes::kRowsPerPass + partition.row;
            const bool valid = begin <= row && row < end && partition.has_column(group, kColumnsValid);
            cp_async_16(partition.address(tile, pass, group), from, valid);
        });
    }

    // The same for a tile of which all rows from kBegin on are read; the others are left alone.
    template <int kBegin = 0>
    __device__ __forceinline__ void load(const Tile& tile) {
        pass_by_pass([&](int pass, int group, const Element* from) {
            const int first = pass * Passes::kRowsPerPass;
            if (first + Passes::kRowsPerPass <= kBegin || (first < kBegin && first + partition.row < kBegin)) return;
            if ((group + 1) * Passes::kLanes * 8 <= kColumnsValid)
                cp_async_16(partition.address(tile, pass, group), from);
            else
                cp_async_16(partition.address(tile, pass, group), from, partition.has_column(group, kColumnsValid));
        });
    }

    template <class Copy>
    __device__ __forceinline__ void pass_by_pass(const Copy& copy) {
#pragma unroll
        for (int pass = Passes::kPasses - 1; pass >= 0; --pass) {
#pragma unroll
            for (int group = 0; group < Passes::kGroups; ++group)
                if (partition.has_row(pass)) copy(pass, group, source + group * Passes::kLanes * 8);
            source -= Passes::kRowsPerPass * row_stride;
            launder(source);
        }
        source += (Passes::kPasses * Passes::kRowsPerPass - Tile::kRowCount) * row_stride;
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

// ==== tile/warp/key_value_reader.cuh =================================================================================

// Loads K and V for a block of the generic forward kernel, from the last tile to the first, into stages that hold a tile of K and one of V.

// A stage holds the values of a tile, and the keys one step before them: what the steps of the tile need, since S is computed one step
// ahead. A load is one group of copies, empty where there is no tile, so that the number of groups under way never depends on the data.
template <class KeyTile, class ValueTile, int kStepKv, int kThreads, int kHeadDim, int kHeadDimV, class Element>
struct KeyValueReader {
    static constexpr int kBlockKv = KeyTile::kRowCount, kSteps = kBlockKv / kStepKv;
    int lowest, tile;  // the tile that is loaded at the end; the one that was loaded last
    TileReader<KeyTile, kThreads, kHeadDim, Element> keys;
    TileReader<ValueTile, kThreads, kHeadDimV, Element> values;

    // `k` and `v` point at the first rows of the sequence. `steps`: those that the block visits.
    template <class Steps>
    __device__ __forceinline__ KeyValueReader(const Element* k, i64 k_row, const Element* v, i64 v_row, const Steps& steps)
        : KeyValueReader(k, k_row, v, v_row, steps.begin / kSteps, steps.last() >= 0 ? steps.last() / kSteps : -1) {}

    // The last tile, which comes first and may end early. The caller commits the group.
    __device__ __forceinline__ void load_last(SharedAddress stage, int len_kv) {
        const int rows_valid = len_kv - tile * kBlockKv;
        keys.load(KeyTile{stage}, tile == 0 ? kStepKv : 0, rows_valid + kStepKv);
        values.load(ValueTile{stage + KeyTile::kBytes}, 0, rows_valid);
    }
    // The tile before, and its group. All others are whole; only the keys one step before tile 0 do not exist.
    __device__ __forceinline__ void load_next(SharedAddress stage) {
        if (--tile > 0 && tile >= lowest)
            keys.load(KeyTile{stage});
        else if (tile == 0 && tile >= lowest && kBlockKv > kStepKv)
            keys.template load<kStepKv>(KeyTile{stage});
        if (tile >= lowest) values.load(ValueTile{stage + KeyTile::kBytes});
        cp_async_commit_group();
    }

  private:
    __device__ __forceinline__ KeyValueReader(const Element* k, i64 k_row, const Element* v, i64 v_row, int lowest, int last)
        : lowest(lowest), tile(last), keys(k + (last * kBlockKv - kStepKv) * k_row, k_row), values(v + last * kBlockKv * v_row, v_row) {}
};

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

// Q read once and kept in registers: kColumns / 4 * kRowTiles of them.
template <int kRowTiles, int kColumns>
struct LeftInRegisters {
    u32 fragments[kRowTiles][kColumns / 16][4];

    __device__ __forceinline__ explicit LeftInRegisters(const LeftInShared<kColumns>& query) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int k = 0; k < kColumns / 16; ++k) query.fragment(fragments[i][k], i, k);
    }

    __device__ __forceinline__ void fragment(u32 (&a)[4], int row_tile, int k) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = fragments[row_tile][k][j];
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

// O += P V for a slice of 16 keys. The tile at `values` holds one key a row.
template <class Element, int kRowTiles, int kOutTiles, int kColumns>
__device__ __forceinline__ void gemm_output(float (&O)[kRowTiles][kOutTiles][4], const u32 (&P)[kRowTiles][4], int slice,
                                            SharedAddress values, const LaneOffsets<kColumns>& offsets) {
#pragma unroll
    for (int j = 0; j < kOutTiles; j += 2) {
        u32 b[4];  // (keys 0-7, d 0-7), (keys 8-15, d 0-7), (keys 0-7, d 8-15), (keys 8-15, d 8-15), each transposed
        ldmatrix_x4_trans(b, offsets.at(values, slice * 16, j));
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            mma_sync_m16n8k16<Element>(O[i][j], P[i], b[0], b[1]);
            mma_sync_m16n8k16<Element>(O[i][j + 1], P[i], b[2], b[3]);
        }
    }
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

// ==== tile/warp/softmax.cuh ==========================================================================================

// Online softmax in base 2 (Milakov and Gimelshein 2018) as in FlashAttention-2, algorithm 1, with conditional rescaling: the row max stays
// as it is until a score exceeds it by kHeadroom. So the usual step needs neither the exact maximum nor an exchange between lanes.

// One lane's sums over its columns of a row tile, for the rows lane/4 and lane/4 + 8. They change once a tile and where a row
// max does, and stay in shared memory in between, because registers limit the tile sizes.
struct LaneSums {
    // compensation: what the additions to row_sum rounded away, exactly where row_sum >= the addend (Dekker 1971)
    float row_sum[2], compensation[2];

    __device__ __forceinline__ static LaneSums load(SharedAddress slot) {
        const uint4 v = load_shared_v4(slot);
        return {{__uint_as_float(v.x), __uint_as_float(v.y)}, {__uint_as_float(v.z), __uint_as_float(v.w)}};
    }
    __device__ __forceinline__ void store(SharedAddress slot) const {
        store_shared_v4(slot, {__float_as_uint(row_sum[0]), __float_as_uint(row_sum[1]), __float_as_uint(compensation[0]),
                               __float_as_uint(compensation[1])});
    }
};

// The statistics of a warp's rows. [i][h] belongs to row i*16 + h*8 + lane/4. The quad of lanes that holds a row has the same row max; each
// lane sums its own columns, and `finish` adds the four sums up.
template <int kRowTiles, int kThreads>
struct OnlineSoftmax {
    static constexpr int kBytes = kRowTiles * kThreads * 16;
    static_assert(kRowTiles <= 2, "in `finish` each lane of a quad has one row");
    float row_max[kRowTiles][2];  // scale_log2 * the maximum of S when it was last updated, rounded
    float shift[kRowTiles][2];    // see Origin; valid if `huge`
    float partial[kRowTiles][2];  // row sums of P since the last add_partial
    bool huge;                    // a row of the warp is huge
    SharedAddress slots;          // this thread's LaneSums of row tile 0; those of the others follow
    float scale_log2, ln2_hi;     // ln2_hi: for origin_at alone

    // `memory` is kBytes of shared memory.
    __device__ __forceinline__ OnlineSoftmax(float scale_log2, float ln2_hi, SharedAddress memory)
        : huge(false), slots(memory + thread_index() * 16), scale_log2(scale_log2), ln2_hi(ln2_hi) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                row_max[i][h] = kInitialRowMax;
                shift[i][h] = 0.0f;
                partial[i][h] = 0.0f;
            }
            LaneSums{}.store(slot(i));
        }
    }

    __device__ __forceinline__ SharedAddress slot(int row_tile) const { return slots + row_tile * kThreads * 16; }

    // Whether a score of this warp exceeds its row max by more than kHeadroom. `masked`: looks for huge rows,
    // too, as a row may meet the first key that it sees, and a huge one below zero exceeds nothing.
    template <int kKeyTiles>
    __device__ __forceinline__ bool needs_rescale(const float (&S)[kRowTiles][kKeyTiles][4], bool masked) const {
        bool any = huge;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float maximum = lane_max(S[i], h);
                any |= fmaf(maximum, scale_log2, -row_max[i][h]) > kHeadroom;
                if (masked) any |= is_huge(maximum, maximum * scale_log2);
            }
        return vote_sync_any(any);
    }

    // Raises the row max to that of S, never lowers it. `factor` then rescales row sums and O. In a warp with huge rows S is shifted.
    template <int kKeyTiles>
    __device__ __forceinline__ void update_row_max(float (&S)[kRowTiles][kKeyTiles][4], float (&factor)[kRowTiles][2]) {
        float maximum[kRowTiles][2];
        bool any_huge = false;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                maximum[i][h] = quad_max(lane_max(S[i], h));
                any_huge |= is_huge(maximum[i][h], mul_rn(maximum[i][h], scale_log2));
            }
        huge |= vote_sync_any(any_huge);
        if (unlikely(huge)) {
            update_huge_row_max(S, maximum, factor);
        } else {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float next = fmaxf(row_max[i][h], mul_rn(maximum[i][h], scale_log2));
                    factor[i][h] = ex2_approx_ftz(row_max[i][h] - next);
                    row_max[i][h] = next;
                }
        }
    }
    template <int kKeyTiles>
    __device__ __forceinline__ void update_huge_row_max(float (&S)[kRowTiles][kKeyTiles][4], const float (&maximum)[kRowTiles][2],
                                                float (&factor)[kRowTiles][2]) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                Origin origin{shift[i][h], row_max[i][h]};
                factor[i][h] = move_origin(origin, maximum[i][h], scale_log2, ln2_hi);
                shift[i][h] = origin.shift;
                row_max[i][h] = origin.row_max;
#pragma unroll
                for (int j = 0; j < kKeyTiles; ++j) {
                    S[i][j][h * 2] -= shift[i][h];
                    S[i][j][h * 2 + 1] -= shift[i][h];
                }
            }
    }

    // The row max of the first S.
    template <int kKeyTiles>
    __device__ __forceinline__ void start(float (&S)[kRowTiles][kKeyTiles][4]) {
        float factor[kRowTiles][2];
        update_row_max(S, factor);
    }

    // Updates the row max, and rescales row sums and O.
    template <int kKeyTiles, int kOutTiles>
    __device__ __forceinline__ void rescale(float (&S)[kRowTiles][kKeyTiles][4], float (&O)[kRowTiles][kOutTiles][4]) {
        float factor[kRowTiles][2];
        update_row_max(S, factor);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            LaneSums row = LaneSums::load(slot(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float factor_of_sum = fmaf(factor[i][h], kEx2Bias, factor[i][h]);  // 1 stays 1
                partial[i][h] *= factor_of_sum;
                row.row_sum[h] *= factor_of_sum;
                row.compensation[h] *= factor_of_sum;
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) O[i][j][e] *= factor[i][h];
            }
            row.store(slot(i));
        }
    }

    // P = exp2(S * scale_log2 - row_max) of a slice of 16 keys, rounded to Element, as the operand of P V: two neighbouring column tiles of
    // the accumulator layout make one operand. Adds P to the partial sums.
    template <class Element, int kKeyTiles>
    __device__ __forceinline__ void exp2_and_sum(u32 (&P)[kRowTiles][4], const float (&S)[kRowTiles][kKeyTiles][4], int slice) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float* pair = S[i][slice * 2 + e / 2] + e % 2 * 2;
                const float low = ex2_approx_ftz(fmaf(pair[0], scale_log2, -row_max[i][e % 2]));
                const float high = ex2_approx_ftz(fmaf(pair[1], scale_log2, -row_max[i][e % 2]));
                partial[i][e % 2] += low;
                partial[i][e % 2] += high;
                P[i][e] = cvt_rn_x2<Element>(low, high);
            }
    }

    // Adds the partial sums to those in shared memory.
    __device__ __forceinline__ void add_partial() {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            LaneSums row = LaneSums::load(slot(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float before = row.row_sum[h];
                row.row_sum[h] = before + partial[i][h];
                row.compensation[h] += partial[i][h] - (row.row_sum[h] - before);
                partial[i][h] = 0.0f;
            }
            row.store(slot(i));
        }
    }

    // Normalises O, and returns lse of one row: lane t of a quad computes that of row [t / 2][t % 2], if there is one. ln2_hi + ln2_lo is
    // scale / scale_log2, about ln 2. A row that sees no key gets O = 0 and lse = -inf.
    template <int kOutTiles>
    __device__ __forceinline__ float finish(float (&O)[kRowTiles][kOutTiles][4], float ln2_lo) {
        add_partial();
        const int own = lane_index() % (kRowTiles * 2);
        float own_total = 0.0f;
        Origin own_origin{};
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const LaneSums row = LaneSums::load(slot(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float total = quad_sum(row.row_sum[h] + row.compensation[h]), inverse = normaliser(total);
                if (own == i * 2 + h) own_total = total, own_origin = {shift[i][h], row_max[i][h]};
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) O[i][j][e] *= inverse;
            }
        }
        if (own_origin.shift == 0.0f) settle(own_origin.row_max, own_total);
        return log_sum_exp(own_origin, own_total, scale_log2, ln2_hi, ln2_lo);
    }
};

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

// `lse` points at the warp's first row. Lane t of a row's four writes `value` for row [t / 2][t % 2], as far as there is one.
template <int kRowTiles>
__device__ __forceinline__ void store_lse(float* lse, int rows_valid, float value) {
    const int own = lane_index() % 4, row = own * 8 + lane_index() / 4;
    if (own < kRowTiles * 2 && row < rows_valid) lse[row] = value;
}

// ---- the kernel -------------------------------------------------------------------------------------------------------

using QueryTile = SharedTile<kBlockQ, kColumns>;
using KeyTile = SharedTile<kBlockKv, kColumns>;
using ValueTile = SharedTile<kBlockKv, kColumnsV>;
using KeyStep = SharedTile<kStepKv, kColumns>;
using ValueStep = SharedTile<kStepKv, kColumnsV>;
using OutTile = SharedTile<kRowsPerWarp, kColumnsV>;  // of a warp

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
attention_forward_bf16_d64_causal_bq128_bk128_sk32_w4_s2_qregisters_fpv_bps1_sm_90a(const __grid_constant__ Parameters p) {
    const WorkTile work = find_work_tile(block_index(), TileScheduler::of(p, p.query_tiles), p.heads_q, p.heads_q_reciprocal);
    const int batch = work.batch, head_kv = divide(work.head, p.group_reciprocal);
    const DenseSequences sequences{p.len_q, p.len_kv, p.heads_q, p.query_tiles};
    const int len_q = sequences.len_q(batch), len_kv = sequences.len_kv(batch);
    const int first_query = work.tile * kBlockQ, queries = min(kBlockQ, len_q - first_query);
    const auto chain = make_chain<kCausal>(len_q, len_kv);
    auto steps = chain.key_tiles<kBlockQ, kStepKv>(first_query);

    const Element* q = sequences.query_row(p.q, {p.q_batch, p.q_head, p.q_row}, batch, work.head, first_query);
    const Element* k = sequences.key_row(p.k, {p.k_batch, p.k_head, p.k_row}, batch, head_kv, 0);
    const Element* v = sequences.key_row(p.v, {p.v_batch, p.v_head, p.v_row}, batch, head_kv, 0);

    // Shared memory: Q, whose rows each warp later uses for its rows of O, which may be wider; a ring of stages for K and V; row sums.
    constexpr int kOutBytes = kWarps * OutTile::kBytes, kQueryBytes = QueryTile::kBytes > kOutBytes ? QueryTile::kBytes : kOutBytes;
    constexpr int kStageBytes = KeyTile::kBytes + ValueTile::kBytes;
    using Softmax = OnlineSoftmax<kRowTiles, kThreads>;
    SharedRegions regions;
    const QueryTile query_tile{regions.take(kQueryBytes)};
    const SharedAddress ring = regions.take(kStages * kStageBytes), sums = regions.take(Softmax::kBytes);
    const SharedAddress last_stage = ring + (kStages - 1) * kStageBytes;

    // Keys are visited from the last to the first, so that those that need the mask come first.
    int step = steps.last();
    TileReader<QueryTile, kThreads, kHeadDim, Element> queries_in(q, p.q_row);
    TileReader<KeyStep, kThreads, kHeadDim, Element> starting_keys(k + step * kStepKv * p.k_row, p.k_row);
    KeyValueReader<KeyTile, ValueTile, kStepKv, kThreads, kHeadDim, kHeadDimV, Element> keys_and_values(k, p.k_row, v, p.v_row, steps);
    queries_in.load(query_tile, 0, queries);
    if (step >= 0) starting_keys.load(KeyStep{last_stage}, 0, len_kv - step * kStepKv);  // no other load fills that stage before next_stage
    cp_async_commit_group();
    if (step >= 0) keys_and_values.load_last(ring, len_kv);
    cp_async_commit_group();
#pragma unroll
    for (int stage = 1; stage < kStages - 1; ++stage) keys_and_values.load_next(ring + stage * kStageBytes);

    const int first_row = warp_index() * kRowsPerWarp;
    const OperandOffsets<kColumns, kColumnsV> offsets;
    const LeftInShared<kColumns> query_in_shared{offsets.keys(), query_tile.base + first_row * QueryTile::kRowBytes};
    Softmax softmax(p.scale_log2, p.ln2_hi, sums);
    float O[kRowTiles][kColumnsV / 8][4] = {}, S[kRowTiles][kStepKv / 8][4];

    cp_async_wait_group<kStages - 1>();
    barrier_sync();  // Q and the first keys are here
    const LeftInRegisters<kRowTiles, kColumns> query(query_in_shared);
    SharedAddress stage = last_stage;  // in use
    int step_in_tile = step % kSteps;
    auto next_stage = [&] {
        cp_async_wait_group<kStages - 2>();
        barrier_sync();  // the next stage is here, and nobody reads the one in use any more
        keys_and_values.load_next(stage);
        stage = stage == last_stage ? ring : stage + kStageBytes;
    };
    if (step >= 0) {
        gemm_scores<Element, kStepKv / 8>(S, 0, query, stage, offsets.keys());
        if (steps.needs_mask(step)) mask_scores(S, first_query + first_row, step * kStepKv, chain);
        softmax.start(S);
        next_stage();
    }

    // P = exp2(S - row_max) and O += P V of this step, in slices of 16 keys; S of the next step takes the registers of those that are used
    // up. So the tensor cores have work while exponentials are under way.
    launder(steps.full_end);  // as a branch, masking stays apart from the products; mixed with them, it would need more registers
    auto run_step = [&](bool has_next, bool next_masked) {
        const SharedAddress keys = stage + step_in_tile * KeyStep::kBytes;
        const SharedAddress values = stage + KeyTile::kBytes + step_in_tile * ValueStep::kBytes;
#pragma unroll
        for (int slice = 0; slice < kStepKv / 16; ++slice) {
            u32 P[kRowTiles][4];
            softmax.exp2_and_sum<Element>(P, S, slice);
            gemm_output<Element>(O, P, slice, values, offsets.values());
            if (has_next) gemm_scores<Element, 2>(S, slice * 2, query, keys, offsets.keys());
        }
        if (!has_next) return;
        const bool masked = next_masked && steps.needs_mask(step - 1);
        if (masked) mask_scores(S, first_query + first_row, (step - 1) * kStepKv, chain);
        if (softmax.needs_rescale(S, masked)) softmax.rescale(S, O);
        if (--step_in_tile < 0) {
            step_in_tile = kSteps - 1;
            softmax.add_partial();
            next_stage();
        }
    };
    // Loops of their own: without the mask the assembler makes a better one.
    for (; step > steps.full_end; --step) run_step(/*has_next=*/true, /*next_masked=*/true);
    for (; step > steps.full_begin; --step) run_step(/*has_next=*/true, /*next_masked=*/false);
    if constexpr (chain.kHidesFirstKeys)
        for (; step > steps.begin; --step) run_step(/*has_next=*/true, /*next_masked=*/true);
    if (step == steps.begin) run_step(/*has_next=*/false, /*next_masked=*/false);

    Element* out = sequences.query_row(p.out, {p.out_batch, p.out_head, p.out_row}, batch, work.head, first_query + first_row);
    const float lse = softmax.finish(O, p.ln2_lo);
    if (p.lse != nullptr)
        store_lse<kRowTiles>(p.lse + sequences.lse_offset(batch, work.head) + first_query + first_row, queries - first_row, lse);
    const OutTile out_tile{query_tile.base + first_row * QueryTile::kRowBytes};
    store_output<kHeadDimV>(out, p.out_row, queries - first_row, O, out_tile);
}
