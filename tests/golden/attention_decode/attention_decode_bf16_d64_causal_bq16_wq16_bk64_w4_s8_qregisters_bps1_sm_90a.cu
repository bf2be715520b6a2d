// attention_decode_bf16_d64_causal_bq16_wq16_bk64_w4_s8_qregisters_bps1_sm_90a
//
// Attention forward for few queries and many keys, as Flash-Decoding (Dao et al. 2023), with equal shares of all keys:
//   S = Q K^T, causal mask,  out = softmax(scale * S) V,  lse = log(sum(exp(scale * S))) for each row.
// A work item is 16 rows of a key/value head: a row is a query of one of the query heads that share it. The warps of a
// block divide the 64 keys of a tile. Where several blocks share an item, the last one to arrive adds up the parts.
//
//   problem  bf16_d64_causal
//   config   block_q 16, warp_q 16, block_kv 64, warps 4, stages 8, query registers, blocks_per_sm 1
//   target   sm_90a
//   launch   <<<blocks, 128, 153616 bytes>>>
//   parts    atoms/ptx: types, register, index, shared_memory, barrier, named_barrier, atomic, cp_async, ldmatrix,
//              mma_sync, cvt, ex2, mul, shfl_sync, vote_sync
//            tile/warp: shared_tile, load, gemm, softmax, item_rows, key_stream, partial_rows
//            tile/common: shared_regions, tile_scheduler, key_shares, sequences, score_chain, softmax_rows, lse,
//              settled_row, partial_outputs

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

// The value of lane 0, which the compiler then knows to be the same in all lanes. All 32 lanes take part.
__device__ __forceinline__ int shfl_sync_first(int value) { return __shfl_sync(0xffffffff, value, 0); }

// The value of that lane, the same one in all lanes. All 32 lanes take part.
__device__ __forceinline__ float shfl_sync_idx(float value, int lane) { return __shfl_sync(0xffffffff, value, lane); }

// ==== atoms/ptx/vote_sync.cuh ========================================================================================

// Votes of a warp. PTX ISA, "vote.sync".

// Whether `predicate` holds for any of the 32 lanes. All take part.
__device__ __forceinline__ bool vote_sync_any(bool predicate) { return __any_sync(0xffffffff, predicate); }

using Element = Bf16;

// ---- what this kernel is specialised for ------------------------------------------------------------------------------

constexpr int kHeadDim = 64, kHeadDimV = 64;
constexpr int kBlockQ = 16, kWarpQ = 16, kBlockKv = 64;
constexpr int kWarps = 4, kStages = 8, kBlocksPerSm = 1;
constexpr bool kCausal = true;

constexpr int kThreads = kWarps * 32, kRowTiles = kWarpQ / 16, kRowGroups = kBlockQ / kWarpQ, kKeyGroups = kWarps / kRowGroups;
constexpr int kGroupThreads = kRowGroups * 32, kGroupKv = kBlockKv / kKeyGroups;  // threads and keys of a key group
constexpr int kTilesASum = 128 / kGroupKv;  // after so many tiles row sums are rounded with compensation
constexpr int kColumns = (kHeadDim + 15) / 16 * 16, kColumnsV = (kHeadDimV + 15) / 16 * 16;  // as the matrix product takes them

// Strides in elements. lse: [batch, heads_q, len_q], dense, or null. scale_log2: softmax scale * log2(e), more than 0; ln2_hi + ln2_lo:
// scale / scale_log2, about ln 2. x_reciprocal: for a division by x (see divide). group: heads_q / heads_kv. row_tiles: work items of a
// key/value head; head_items: those of all heads of a sequence; key_tiles: tiles of each item; aligned_shares: see own_share.
// partials: see PartialOutputs. part_counters: parts of an item that have arrived, by the first block that has one; 0 before and after a
// launch. Both are null where no item is cut.
struct Parameters {
    const Element* q;
    const Element* k;
    const Element* v;
    Element* out;
    float* lse;
    float* partials;
    u32* part_counters;
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
    u64 key_tiles_reciprocal;
    u64 batch_reciprocal;
    u64 row_tiles_reciprocal;
    u64 group_reciprocal;
    u64 blocks_reciprocal;
    u64 aligned_shares_reciprocal;
    int key_tiles;
    int batch;
    int row_tiles;
    int group;
    int blocks;
    int aligned_shares;
    int share_distance;
    int head_items;
    int heads_q;
    int len_q;
    int len_kv;
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

// ==== tile/warp/item_rows.cuh ========================================================================================

// PackGQA where the group of query heads that share keys is known at launch: row r of a key/value head's queries is query r / group of the
// group's head r % group. A work item has kRows of these rows, the last one of a key/value head maybe fewer.

struct PackedRow {
    int query, head;
};

template <int kRows, class Parameters>
struct ItemRows {
    const Parameters& p;
    int batch, head_kv, first_row, rows;  // rows: that there are

    __device__ __forceinline__ ItemRows(const Parameters& p, const HeadTiles& item)
        : p(p), batch(item.batch), head_kv(divide(item.head, p.row_tiles_reciprocal)),
          first_row((item.head - head_kv * p.row_tiles) * kRows), rows(min(kRows, p.len_q * p.group - first_row)) {}

    __device__ __forceinline__ int query(int row) const { return divide(first_row + row, p.group_reciprocal); }
    __device__ __forceinline__ PackedRow at(int row) const {
        const int of_row = query(row);
        return {of_row, head_kv * p.group + first_row + row - of_row * p.group};
    }

    // Some row sees keys of the key tiles [begin, end), all rows see those of [full_begin, full_end).
    template <int kBlockKv, class Chain>
    __device__ __forceinline__ KeyTileRange<Chain::kHidesFirstKeys> key_tiles(const Chain& chain) const {
        const KeyRange of_first = chain.keys(query(0)), of_last = chain.keys(query(rows - 1));
        return {of_first.begin / kBlockKv, (of_last.begin + kBlockKv - 1) / kBlockKv, max(0, of_first.end) / kBlockKv,
                (max(0, of_last.end) + kBlockKv - 1) / kBlockKv};
    }

    // Copies Q to shared memory; it is 0 where there is no row or column. All threads of the block take part.
    template <int kThreads, int kColumnsValid, class Element, class Tile, class Sequences>
    __device__ __forceinline__ void load_queries(const Tile& tile, const Element* q, const Strides& strides,
                                                 const Sequences& sequences) const {
        for (int n = thread_index(); n < kRows * Tile::kChunks; n += kThreads) {
            const int row = n / Tile::kChunks, chunk = n % Tile::kChunks;
            uint4 loaded{0, 0, 0, 0};
            if (row < rows && chunk * 8 < kColumnsValid) {
                const PackedRow from = at(row);
                loaded = *reinterpret_cast<const uint4*>(sequences.query_row(q, strides, batch, from.head, from.query) + chunk * 8);
            }
            store_shared_v4(tile.at(row, chunk), loaded);
        }
    }

    // S = -inf where the chain hides a key from a row. `first` is the warp's first row, `first_key` the key of its first column.
    template <class Chain, int kRowTiles, int kKeyTiles>
    __device__ __forceinline__ void mask(float (&S)[kRowTiles][kKeyTiles][4], int first, int first_key, const Chain& chain) const {
        const int lane = lane_index();
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const KeyRange seen = chain.keys(query(first + i * 16 + h * 8 + lane / 4));
#pragma unroll
                for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int key = first_key + j * 8 + lane % 4 * 2 + e;
                        if (key >= seen.end || (Chain::kHidesFirstKeys && key < seen.begin)) S[i][j][h * 2 + e] = -infinity();
                    }
            }
    }
};

// ==== tile/warp/key_stream.cuh =======================================================================================

// Brings the keys and values of a block's share to shared memory, tile by tile and across the borders of work items, so that copies are
// under way while a block ends an item and begins the next one.

// Key group g of a block reads keys [g * kGroupKv, (g + 1) * kGroupKv) of each tile, and its kThreads threads copy just these: so no other
// warps need to know when they have landed. Keys behind the last one are not read, and the tiles hold zeros there: for V that matters, as
// 0 * NaN is NaN.
template <class KeyTile, class ValueTile, int kBlockKv, int kThreads, int kHeadDim, int kHeadDimV, class Element, class Items>
struct KeyStream {
    static constexpr int kGroupKv = KeyTile::kRowCount;
    const Items& items;  // finds the visible part of a work item's keys, and their rows
    KeyPart<DenseKeyTiles> part;  // the one that comes next
    int tile, end;                // of the part that is under way: the item's tile that comes next, and where the visible ones end
    int first_key, len_kv, key_group, thread;  // first_key: the group's first key of the tile that comes next
    const Element *k, *v;  // what this thread copies first of it

    __device__ __forceinline__ KeyStream(const Items& items, const KeyPart<DenseKeyTiles>& first, int key_group)
        : items(items), part(first), tile(0), end(0), first_key(0), len_kv(0), key_group(key_group), thread(thread_index() % kThreads),
          k(nullptr), v(nullptr) {}

    // Starts the copies of the next tile and closes their group, which is empty where no tile is left. A slot holds a group's keys and its
    // values.
    __device__ __forceinline__ void load_next(SharedAddress slot) {
        while (tile >= end && part.exists()) begin_part();
        if (tile < end) {
            const int keys = len_kv - first_key;
            copy<kHeadDim>(KeyTile{slot}, k, items.p.k_row, keys);
            copy<kHeadDimV>(ValueTile{slot + KeyTile::kBytes}, v, items.p.v_row, keys);
            ++tile, first_key += kBlockKv;
        }
        cp_async_commit_group();
    }

  private:
    __device__ __forceinline__ void begin_part() {
        const auto work = items.work(part);
        tile = work.begin, end = work.end, len_kv = work.len_kv, first_key = tile * kBlockKv + key_group * kGroupKv;
        part.advance(items.shares);
        const CopyPartition<kThreads, KeyTile> of_keys(thread);
        const CopyPartition<kThreads, ValueTile> of_values(thread);
        k = items.key_row(work, first_key + of_keys.row) + of_keys.chunk * 8;
        v = items.value_row(work, first_key + of_values.row) + of_values.chunk * 8;
    }

    template <int kColumnsValid, class Tile>
    __device__ __forceinline__ void copy(const Tile& tile, const Element*& from, i64 row_stride, int rows_valid) {
        const CopyPartition<kThreads, Tile> partition(thread);
#pragma unroll
        for (int pass = 0; pass < partition.kPasses; ++pass) {
            const int row = pass * partition.kRowsPerPass + partition.row;
#pragma unroll
            for (int group = 0; group < partition.kGroups; ++group)
                if (partition.has_row(pass))
                    cp_async_16(partition.address(tile, pass, group), from + group * partition.kLanes * 8,
                                row < rows_valid && partition.has_column(group, kColumnsValid));
            from += partition.kRowsPerPass * row_stride;
            launder(from);  // or the compiler would keep the addresses of all passes in registers of their own
        }
        from += (kBlockKv - partition.kPasses * partition.kRowsPerPass) * row_stride;
    }
};

// ==== tile/warp/partial_rows.cuh =====================================================================================

// What each of a block's key groups has of the rows of a part, and their sum in the order of the groups.

// One group's rows in shared memory, kColumns columns of them: O in fp32, not normalised, and with each row its sum and origin. The gap
// between rows puts what a warp writes at once into different banks.
template <int kRows, int kColumns>
struct GroupRows {
    static constexpr int kRowBytes = kColumns * 4 + 32, kBytes = kRows * kRowBytes;
    SharedAddress base;

    __device__ __forceinline__ SharedAddress at(int row, int column) const { return base + row * kRowBytes + column * 4; }
    __device__ __forceinline__ SharedAddress statistics(int row) const { return at(row, kColumns); }

    // Writes columns [slice * kColumns, (slice + 1) * kColumns) of a warp's rows from `first_row` on, as far as they exist.
    template <int kRowTiles, int kOutTiles, class Softmax>
    __device__ __forceinline__ void store(const float (&O)[kRowTiles][kOutTiles][4], const Softmax& softmax, int slice, int first_row,
                                          int rows) const {
        const int lane = lane_index();
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const LaneSums sums = LaneSums::load(softmax.slot(i));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = first_row + i * 16 + h * 8 + lane / 4;
                const float total = quad_sum(sums.row_sum[h] + sums.compensation[h]);
                if (row >= rows) continue;
                if (lane % 4 == 0)
                    store_shared_v4(statistics(row), {__float_as_uint(total), __float_as_uint(softmax.shift[i][h]),
                                                      __float_as_uint(softmax.row_max[i][h]), 0});
#pragma unroll
                for (int j = slice * kColumns / 8; j < kOutTiles && j < (slice + 1) * kColumns / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        store_shared(at(row, j * 8 - slice * kColumns + lane % 4 * 2 + e), __float_as_uint(O[i][j][h * 2 + e]));
            }
        }
    }
};

// Shared memory for the rows of kGroups groups, which go through it in slices of some columns, as rings need the rest of it.
template <int kGroups, int kRows, int kColumns>
struct GroupSums {
    static constexpr int kSliceColumns = kColumns < 64 ? kColumns : 64, kSlices = (kColumns + 63) / 64;
    using Slice = GroupRows<kRows, kSliceColumns>;
    static constexpr int kBytes = kGroups * Slice::kBytes;
    SharedAddress base;

    // Adds up the groups' rows, in this order. Each of the block's kThreads threads takes some groups of four columns, for which it calls
    // store(row, column, MergedRow).
    template <int kThreads, int kRowTiles, int kOutTiles, class Softmax, class Store>
    __device__ __forceinline__ void merge(const float (&O)[kRowTiles][kOutTiles][4], Softmax& softmax, int own_group, int first_row,
                                          int rows, const Store& store) const {
        constexpr int kQuads = kSliceColumns / 4;
        softmax.add_partial();
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
            barrier_sync();  // nobody reads what lay here, or Q, any more
            of_group(own_group).store(O, softmax, slice, first_row, rows);
            barrier_sync();  // what all groups have is here
#pragma unroll 1
            for (int i = thread_index(); i < rows * kQuads; i += kThreads) {
                const int row = i / kQuads, column = i % kQuads * 4;
                if (slice * kSliceColumns + column >= kColumns) continue;  // the last slice may be narrower
                MergedRow merged;
#pragma unroll
                for (int group = 0; group < kGroups; ++group)
                    merged.add(load_shared_v4(of_group(group).at(row, column)), load_shared_v4(of_group(group).statistics(row)),
                               softmax.scale_log2);
                store(row, slice * kSliceColumns + column, merged);
            }
        }
    }

  private:
    __device__ __forceinline__ Slice of_group(int group) const { return {base + group * Slice::kBytes}; }
};

// ---- the kernel -------------------------------------------------------------------------------------------------------

using QueryTile = SharedTile<kBlockQ, kColumns>;
using KeyTile = SharedTile<kGroupKv, kColumns>;     // of a key group
using ValueTile = SharedTile<kGroupKv, kColumnsV>;
using Softmax = OnlineSoftmax<kRowTiles, kThreads>;
using Rows = ItemRows<kBlockQ, Parameters>;

// A part of a work item: its rows, and the key tiles [begin, end) of the part that some of them see. Tiles of the item are counted from the
// first one that any of its rows sees.
struct Work {
    Rows rows;
    int len_q, len_kv, begin, end, full_begin, full_end;  // all rows see the keys of tiles [full_begin, full_end)

    __device__ __forceinline__ auto chain() const { return make_chain<kCausal>(len_q, len_kv); }
};

struct Items {
    const Parameters& p;
    const KeyShares<DenseKeyTiles> shares;
    const DenseSequences sequences;

    __device__ __forceinline__ explicit Items(const Parameters& p)
        : p(p), shares({p.key_tiles, p.head_items, p.batch, p.key_tiles_reciprocal, p.batch_reciprocal}, p.blocks, p.blocks_reciprocal),
          sequences{p.len_q, p.len_kv, p.heads_q, p.row_tiles} {}

    __device__ __forceinline__ Work work(const KeyPart<DenseKeyTiles>& part) const {
        Work work{Rows(p, part.head), sequences.len_q(part.head.batch), sequences.len_kv(part.head.batch)};
        const auto tiles = work.rows.template key_tiles<kBlockKv>(work.chain());
        work.begin = tiles.begin + part.first_in_head(), work.end = min(work.begin + part.count(), tiles.end);
        work.full_begin = tiles.full_begin, work.full_end = tiles.full_end;
        return work;
    }
    __device__ __forceinline__ const Element* key_row(const Work& work, int key) const {
        return sequences.key_row(p.k, {p.k_batch, p.k_head, p.k_row}, work.rows.batch, work.rows.head_kv, key);
    }
    __device__ __forceinline__ const Element* value_row(const Work& work, int key) const {
        return sequences.key_row(p.v, {p.v_batch, p.v_head, p.v_row}, work.rows.batch, work.rows.head_kv, key);
    }
    // Writes four columns of a row of O, and lse with the first of them.
    __device__ __forceinline__ void store(const Work& work, int row, int column, const MergedRow& merged) const {
        const PackedRow to = work.rows.at(row);
        const float inverse = normaliser(merged.total);
        const u64 low = cvt_rn_x2<Element>(merged.columns[0] * inverse, merged.columns[1] * inverse);
        const u64 high = cvt_rn_x2<Element>(merged.columns[2] * inverse, merged.columns[3] * inverse);
        Element* out = sequences.query_row(p.out, {p.out_batch, p.out_head, p.out_row}, work.rows.batch, to.head, to.query);
        if (column < kHeadDimV) *reinterpret_cast<u64*>(out + column) = low | high << 32;
        if (column > 0 || p.lse == nullptr) return;
        Origin origin = merged.origin;
        float total = merged.total;
        if (origin.shift == 0.0f) settle(origin.row_max, total);
        const float lse = log_sum_exp(origin, total, p.scale_log2, p.ln2_hi, p.ln2_lo);
        p.lse[sequences.lse_offset(work.rows.batch, to.head) + to.query] = lse;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
attention_decode_bf16_d64_causal_bq16_wq16_bk64_w4_s8_qregisters_bps1_sm_90a(const __grid_constant__ Parameters p) {
    const Items items(p);
    const int key_group = warp_index() / kRowGroups, first_row = warp_index() % kRowGroups * kWarpQ;  // of this warp
    KeyPart<DenseKeyTiles> part(items.shares, own_share(p));

    // Shared memory: Q; a ring of stages, each with the keys and the values of every key group; what the groups have of O; row sums.
    using OutSums = GroupSums<kKeyGroups, kBlockQ, kColumnsV>;
    constexpr int kSlotBytes = KeyTile::kBytes + ValueTile::kBytes, kStageBytes = kKeyGroups * kSlotBytes;
    SharedRegions regions;
    const QueryTile query_tile{regions.take(QueryTile::kBytes)};
    const SharedAddress ring = regions.take(kStages * kStageBytes);
    const OutSums out_sums{regions.take(OutSums::kBytes)};
    const SharedAddress row_sums = regions.take(Softmax::kBytes), flag = regions.take(16);
    const SharedAddress first_slot = ring + key_group * kSlotBytes, last_slot = first_slot + (kStages - 1) * kStageBytes;

    KeyStream<KeyTile, ValueTile, kBlockKv, kGroupThreads, kHeadDim, kHeadDimV, Element, Items> stream(items, part, key_group);
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) stream.load_next(first_slot + stage * kStageBytes);

    const OperandOffsets<kColumns, kColumnsV> offsets;
    const LeftInShared<kColumns> query_in_shared{offsets.keys(), query_tile.base + first_row * QueryTile::kRowBytes};
    SharedAddress slot = first_slot, free_slot = last_slot;  // slot: of the tile that comes next
    for (; part.exists(); part.advance(items.shares)) {
        const Work work = items.work(part);
        const auto chain = work.chain();
        work.rows.template load_queries<kThreads, kHeadDim>(query_tile, p.q, {p.q_batch, p.q_head, p.q_row}, items.sequences);
        barrier_sync();  // Q is here
        const LeftInRegisters<kRowTiles, kColumns> query(query_in_shared);
        Softmax softmax(p.scale_log2, p.ln2_hi, row_sums);
        float O[kRowTiles][kColumnsV / 8][4] = {};
        for (int tile = work.begin; tile < work.end; ++tile) {
            cp_async_wait_group<kStages - 2>();
            // The group's keys are here, and none of its warps reads the tile before any more.
            if constexpr (kRowGroups == 1)
                barrier_warp_sync();
            else
                bar_sync(1 + key_group, kGroupThreads);
            stream.load_next(free_slot);

            float S[kRowTiles][kGroupKv / 8][4];
            gemm_scores<Element, kGroupKv / 8>(S, 0, query, slot, offsets.keys());
            const int first_key = tile * kBlockKv + key_group * kGroupKv;
            if (tile >= work.full_end || (chain.kHidesFirstKeys && tile < work.full_begin)) work.rows.mask(S, first_row, first_key, chain);
            // A warp meets the first key of a row in its own keys of the tile where the row's begin, or of the next one.
            const bool may_be_first = tile == work.begin || (chain.kHidesFirstKeys && tile <= work.full_begin + 1);
            if (softmax.needs_rescale(S, may_be_first)) softmax.rescale(S, O);
#pragma unroll
            for (int slice = 0; slice < kGroupKv / 16; ++slice) {
                u32 P[kRowTiles][4];
                softmax.exp2_and_sum<Element>(P, S, slice);
                gemm_output<Element>(O, P, slice, slot + KeyTile::kBytes, offsets.values());
            }
            if (tile % kTilesASum == kTilesASum - 1) softmax.add_partial();
            free_slot = slot;
            slot = slot == last_slot ? first_slot : slot + kStageBytes;
        }

        const auto finish = [&](int row, int column, const MergedRow& merged) { items.store(work, row, column, merged); };
        if (part.is_whole()) {
            out_sums.template merge<kThreads>(O, softmax, key_group, first_row, work.rows.rows, finish);
            continue;
        }
        const PartialOutputs<kColumnsV> partials{p.partials, kBlockQ};
        const int own_slot = partials.slot_of(own_share(p), part.is_first);
        out_sums.template merge<kThreads>(
            O, softmax, key_group, first_row, work.rows.rows, [&](int row, int column, const MergedRow& merged) {
                float* to = partials.row(own_slot, row);
                const float* O_of_part = merged.columns;
                *reinterpret_cast<uint4*>(to + column) = {__float_as_uint(O_of_part[0]), __float_as_uint(O_of_part[1]),
                                                          __float_as_uint(O_of_part[2]), __float_as_uint(O_of_part[3])};
                if (column == 0) partials.store_statistics(to, merged.total, merged.origin);
            });
        const HeadParts parts = items.shares.parts(part.head);
        barrier_sync();  // this block's part is in memory
        if (thread_index() == 0) store_shared(flag, is_last_part(p.part_counters + parts.first_block, parts));
        barrier_sync();
        if (load_shared(flag)) merge_parts<kThreads>(partials, parts, 0, work.rows.rows, thread_index(), p.scale_log2, finish);
    }
}
