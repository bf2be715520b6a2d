// attention_forward_fp16_d192x128_causal_bq128_bk32_w8_s1_qshared_bps1_sm_90a
//
// Attention forward, FlashAttention-2 (Dao 2023), algorithm 1:
//   out = softmax(scale * Q K^T + causal mask) V,  lse = log(sum(exp(scale * Q K^T))) for each row.
// A block computes 128 query rows of one head, 16 a warp, and walks over the keys in tiles of 32.
//
//   problem  fp16_d192x128_causal
//   config   block_q 128, block_kv 32, warps 8, stages 1, query shared, blocks_per_sm 1
//   target   sm_90a
//   launch   <<<ceil(len_q / 128) * heads_q * batch, 256, 69632 bytes>>>

// Fixed-width integers and element types. NVRTC brings no headers, so neither <cstdint> nor <cuda_bf16.h> is there.

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

struct Bf16 { u16 bits; };
struct Fp16 { u16 bits; };

// A function: NVRTC has no constant expression for infinity without headers.
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Who a thread is. PTX ISA, "Special Registers": %tid, %ctaid.

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }

__device__ __forceinline__ int block_index() { return static_cast<int>(blockIdx.x); }

__device__ __forceinline__ int lane_index() { return thread_index() % 32; }

// The same for all lanes of a warp. The shuffle tells the compiler so, which lets it keep what follows in uniform registers.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffff, thread_index() / 32, 0); }

// Shared memory: where it begins, and ordinary reads and writes of it. PTX ISA, "ld", "st", "cvta".

using SharedAddress = u32;  // byte address in the shared window

// The block's dynamic shared memory, aligned to 128 bytes. The only shared variable of a kernel.
__device__ __forceinline__ SharedAddress shared_memory() {
    extern __shared__ __align__(128) unsigned char memory[];
    return static_cast<SharedAddress>(__cvta_generic_to_shared(memory));
}

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

// Barriers. PTX ISA, "bar, barrier" and "bar.warp.sync".

// All threads of the block arrive; what they wrote to shared memory before is visible to all of them after.
__device__ __forceinline__ void barrier_sync() { __syncthreads(); }

// Asynchronous copies from global to shared memory. PTX ISA, "cp.async" and its completion by groups (sm_80).

// Copies 16 bytes past L1; where `valid` is false it reads nothing and writes 16 zero bytes.
__device__ __forceinline__ void cp_async_16(SharedAddress destination, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(destination), "l"(__cvta_generic_to_global(source)), "r"(valid ? 16 : 0)
                 : "memory");
}

// Closes this thread's group of the copies issued since the last commit. A group may be empty.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's most recent groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

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

// Natural logarithm to 1 ulp. No single instruction: lg2.approx is good to 22 bits only.

__device__ __forceinline__ float natural_log(float x) { return logf(x); }

// A product rounded by itself. PTX ISA, "mul" with a rounding mode: never fused with the addition that follows.

__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }

// Exchange of registers between the lanes of a warp. PTX ISA, "shfl.sync".

// The value of lane (own lane xor `lane_mask`). All 32 lanes take part.
__device__ __forceinline__ float shfl_sync_bfly(float value, int lane_mask) {
    return __shfl_xor_sync(0xffffffff, value, lane_mask);
}

using Element = Fp16;

// ---- what this kernel is specialised for ------------------------------------------------------------------------------

constexpr int kHeadDim = 192, kHeadDimV = 128;
constexpr int kBlockQ = 128, kBlockKv = 32;
constexpr int kWarps = 8, kStages = 1, kBlocksPerSm = 1;
constexpr bool kCausal = true;

constexpr int kThreads = kWarps * 32;
constexpr int kRowsPerWarp = kBlockQ / kWarps, kRowTiles = kRowsPerWarp / 16;
constexpr int kColumns = (kHeadDim + 15) / 16 * 16, kColumnsV = (kHeadDimV + 15) / 16 * 16;  // as the matrix product takes them

// Strides in elements. lse is [batch, heads_q, len_q], dense.
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
    int heads_q;
    int group;
    int len_q;
    int len_kv;
    float scale;
    float scale_low;
    float scale_log2;
};

// ---- tile operations --------------------------------------------------------------------------------------------------

// A tile in shared memory and its swizzle: where element (row, column) lies.

// A place in a tile that a thread computes once, and from which it reaches others by constants that fold into its
// instructions: `at` adds rows in multiples of 8, which leave the permutation as it is, and chunks that have no bit in common
// with the place's own.
template <int kRowBytes, int kSwizzle>
struct SharedPlace {
    SharedAddress row;
    u32 permuted;  // byte offset of the place's chunk within its group of kSwizzle chunks, permuted

    __device__ __forceinline__ SharedAddress at(int rows, int chunks) const {
        return row + (permuted ^ chunks % kSwizzle * 16) + (rows * kRowBytes + chunks / kSwizzle * kSwizzle * 16);
    }
};

// kRows x kColumns 16-bit elements, row-major in chunks of 16 bytes (8 elements). Within a row the chunks are permuted so that
// 8 rows of one chunk column, which is what ldmatrix reads at once, fall into 8 different groups of 4 banks. Rows that
// are 2^k * odd chunks long come back to the same bank group every 8 / 2^k rows, so an XOR of the k low bits is enough.
template <int kRows, int kColumns>
struct SharedTile {
    static_assert(kColumns % 16 == 0, "the matrix product reads 16 columns at a time");
    static constexpr int kChunks = kColumns / 8;
    static constexpr int kBytes = kRows * kColumns * 2;
    static constexpr int kSwizzle = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
    using Place = SharedPlace<kChunks * 16, kSwizzle>;

    SharedAddress base;

    __device__ __forceinline__ Place place(int row, int chunk) const {
        const int group = chunk / kSwizzle * kSwizzle, permuted = chunk % kSwizzle ^ row / (8 / kSwizzle) % kSwizzle;
        return {base + static_cast<u32>((row * kChunks + group) * 16), static_cast<u32>(permuted * 16)};
    }
};

// Which work a block does: block index -> (query tile, head, batch), and which key tiles that takes.

struct Work {
    int query_tile, head, batch;
};

// Query tiles of one head are neighbours, so that blocks running together share K and V in L2. Under a causal mask the
// last query tiles have the most keys and go first.
template <bool kCausal>
__device__ __forceinline__ Work find_work(int block, int query_tiles, int heads) {
    const int tile = block % query_tiles, head_and_batch = block / query_tiles;
    return {kCausal ? query_tiles - 1 - tile : tile, head_and_batch % heads, head_and_batch / heads};
}

// Key tiles [0, full) are seen whole by every query of the tile, [full, end) need masking, the rest is seen by none.
struct KeyTiles {
    int full, end;
};

template <bool kCausal, int kBlockQ, int kBlockKv>
__device__ __forceinline__ KeyTiles find_key_tiles(int first_query, int len_kv, int diagonal) {
    // The first query sees keys [0, seen_by_first), the last one [0, seen_by_last).
    const int seen_by_first = kCausal ? min(len_kv, max(0, first_query + 1 + diagonal)) : len_kv;
    const int seen_by_last = kCausal ? min(len_kv, max(0, first_query + kBlockQ + diagonal)) : len_kv;
    return {seen_by_first / kBlockKv, (seen_by_last + kBlockKv - 1) / kBlockKv};
}

// Where the rows of a sequence lie in global memory: dense tensors here; packed or paged ones would differ only in this file.

// The first row of (batch, head) in a tensor with these strides, in elements.
template <class Element>
__device__ __forceinline__ Element* sequence_rows(Element* base, int batch, i64 batch_stride, int head, i64 head_stride) {
    return base + batch * batch_stride + head * head_stride;
}

// Copies of tiles between global and shared memory, 16 bytes a thread and pass, rows and columns past the end left out.

// How the threads of a block cover a tile. A pass takes as many whole rows as there are threads for, so that a thread keeps
// its chunk and its addresses advance by constants; threads that a pass does not need idle.
template <int kThreads, int kRows, int kChunks>
struct Passes {
    static constexpr int kRowsPerPass = kThreads / kChunks;
    static constexpr int kCount = (kRows + kRowsPerPass - 1) / kRowsPerPass;
    static constexpr bool kEven = kThreads % kChunks == 0 && kRows % kRowsPerPass == 0;  // every thread has a row in each pass
    static constexpr bool kSameSwizzle = kRowsPerPass % 8 == 0;                          // all rows of a thread are permuted alike
    int row = thread_index() / kChunks, chunk = thread_index() % kChunks;                // of this thread in the first pass

    __device__ __forceinline__ bool has_row(int pass) const {
        return kEven || (row < kRowsPerPass && pass * kRowsPerPass + row < kRows);
    }

    template <class Tile>
    __device__ __forceinline__ SharedAddress address(const Tile& tile, int pass) const {
        if (kSameSwizzle) return tile.place(row, chunk).at(pass * kRowsPerPass, 0);
        return tile.place(pass * kRowsPerPass + row, chunk).at(0, 0);
    }
};

// Starts the copy of a tile. `rows` points at the tile's first row; rows from `rows_valid` on and columns from kColumnsValid
// on are not read: the tile holds zeros there. The caller commits the group.
template <int kThreads, int kColumnsValid, class Element, int kRows, int kColumns>
__device__ __forceinline__ void load_tile_async(const SharedTile<kRows, kColumns>& tile, const Element* rows, i64 row_stride,
                                                int rows_valid) {
    using Cover = Passes<kThreads, kRows, kColumns / 8>;
    const Cover cover;
    const Element* source = rows + cover.row * row_stride + cover.chunk * 8;
#pragma unroll
    for (int pass = 0; pass < Cover::kCount; ++pass) {
        const bool valid = pass * Cover::kRowsPerPass + cover.row < rows_valid && cover.chunk * 8 < kColumnsValid;
        if (cover.has_row(pass)) cp_async_16(cover.address(tile, pass), source, valid);
        source += Cover::kRowsPerPass * row_stride;
    }
}

// Writes the tile's valid rows and columns to global memory.
template <int kThreads, int kColumnsValid, class Element, int kRows, int kColumns>
__device__ __forceinline__ void store_tile(Element* rows, i64 row_stride, int rows_valid, const SharedTile<kRows, kColumns>& tile) {
    using Cover = Passes<kThreads, kRows, kColumnsValid / 8>;
    const Cover cover;
    Element* destination = rows + cover.row * row_stride + cover.chunk * 8;
#pragma unroll
    for (int pass = 0; pass < Cover::kCount; ++pass) {
        if (cover.has_row(pass) && pass * Cover::kRowsPerPass + cover.row < rows_valid)
            *reinterpret_cast<uint4*>(destination) = load_shared_v4(cover.address(tile, pass));
        destination += Cover::kRowsPerPass * row_stride;
    }
}

// The two matrix products of attention, for one warp: S = Q K^T and O += P V.
//
// A warp owns kRowTiles * 16 query rows. Accumulators are arrays [row tile][column tile of 8][4], laid out as mma_sync.cuh
// says: [0], [1] belong to row lane/4, [2], [3] to row lane/4 + 8.

// Q read from shared memory at each use: costs bandwidth, saves registers. The tile's rows from `first_row` on are the warp's.
template <int kRowTiles, int kRows, int kColumns>
struct QueryInShared {
    typename SharedTile<kRows, kColumns>::Place place;

    __device__ __forceinline__ QueryInShared(const SharedTile<kRows, kColumns>& tile, int first_row)
        : place(tile.place(first_row + lane_index() % 16, lane_index() / 16)) {}

    __device__ __forceinline__ void fragment(u32 (&a)[4], int row_tile, int step) const {
        ldmatrix_x4(a, place.at(row_tile * 16, step * 2));
    }
};

// Q read once and kept in registers: kColumns / 4 * kRowTiles of them.
template <int kRowTiles, int kRows, int kColumns>
struct QueryInRegisters {
    u32 fragments[kRowTiles][kColumns / 16][4];

    __device__ __forceinline__ explicit QueryInRegisters(const QueryInShared<kRowTiles, kRows, kColumns>& query) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int step = 0; step < kColumns / 16; ++step) query.fragment(fragments[i][step], i, step);
    }

    __device__ __forceinline__ void fragment(u32 (&a)[4], int row_tile, int step) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = fragments[row_tile][step][j];
    }
};

// scores = Q K^T; `keys` holds one key a row.
template <class Element, class Query, int kRowTiles, int kKeyTiles, int kKeys, int kColumns>
__device__ __forceinline__ void gemm_scores(float (&scores)[kRowTiles][kKeyTiles][4], const Query& query,
                                            const SharedTile<kKeys, kColumns>& keys) {
    const int lane = lane_index();
    const auto place = keys.place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i][j][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
        u32 a[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) query.fragment(a[i], i, step);
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
            u32 b[4];  // (keys 0-7, d 0-7), (keys 0-7, d 8-15), (keys 8-15, d 0-7), (keys 8-15, d 8-15)
            ldmatrix_x4(b, place.at(j * 8, step * 2));
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_sync_m16n8k16<Element>(scores[i][j], a[i], b[0], b[1]);
                mma_sync_m16n8k16<Element>(scores[i][j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// out += P V; `values` holds one key a row. The accumulator layout of two neighbouring column tiles of P is the operand
// layout of one step of 16 keys, so P goes from product to product in registers, rounded to Element on the way.
template <class Element, int kRowTiles, int kKeyTiles, int kOutTiles, int kKeys, int kColumns>
__device__ __forceinline__ void gemm_output(float (&out)[kRowTiles][kOutTiles][4],
                                            const float (&probabilities)[kRowTiles][kKeyTiles][4],
                                            const SharedTile<kKeys, kColumns>& values) {
    const auto place = values.place(lane_index() % 16, lane_index() / 16);
#pragma unroll
    for (int step = 0; step < kKeyTiles / 2; ++step) {
        u32 a[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float(&pair)[4] = probabilities[i][step * 2 + e / 2];
                a[i][e] = cvt_rn_x2<Element>(pair[e % 2 * 2], pair[e % 2 * 2 + 1]);
            }
#pragma unroll
        for (int j = 0; j < kOutTiles; j += 2) {
            u32 b[4];  // (keys 0-7, d 0-7), (keys 8-15, d 0-7), (keys 0-7, d 8-15), (keys 8-15, d 8-15), each transposed
            ldmatrix_x4_trans(b, place.at(step * 16, j));
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_sync_m16n8k16<Element>(out[i][j], a[i], b[0], b[1]);
                mma_sync_m16n8k16<Element>(out[i][j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// Which scores count: sets the others to -inf. Score modifications (biases, windows, soft caps) would have their place here.

// `first_query` and `first_key` are the positions of scores[0][0] of this warp. A key counts if it is below
// min(len_kv, query + 1 + diagonal): for a causal mask aligned bottom-right, diagonal = len_kv - len_q.
template <bool kCausal, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void mask_scores(float (&scores)[kRowTiles][kKeyTiles][4], int first_query, int first_key, int len_kv,
                                            int diagonal) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int query = first_query + i * 16 + e / 2 * 8 + lane / 4;
            const int end = kCausal ? min(len_kv, query + 1 + diagonal) : len_kv;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j)
                if (first_key + j * 8 + lane % 4 * 2 + e % 2 >= end) scores[i][j][e] = -infinity();
        }
}

// Online softmax in base 2: Milakov and Gimelshein 2018, in the form of FlashAttention-2, algorithm 1.

// By how much ex2.approx is too small on average, relatively, for arguments from -16 to -1 (measured on sm_90). For one value that
// is nothing; it is put right where it adds up: in the sum, and in the factor that rescales the sum tile after tile.
constexpr float kEx2Lean = 5.0e-8f;

// log(total) + maximum * (scale + scale_low), to about one rounding. fp32 needs some care for that: the two terms are taken apart
// into what is rounded once, in the end, and small corrections. `total` is finite and > 0, or NaN.
__device__ __forceinline__ float log_sum_exp(float maximum, float total, float scale, float scale_low, float scale_log2) {
    constexpr float kLn2 = 0.693147182f, kLn2Low = -1.90465430e-9f;
    // total = fraction * 2^exponent, with a fraction from 1 to 2 whose logarithm is small.
    const int biased = __float_as_int(total) >> 23;
    const float exponent = static_cast<float>(biased - 127), fraction = total * __int_as_float((254 - biased) << 23);
    const float a = mul_rn(maximum, scale), b = mul_rn(exponent, kLn2);
    const float sum = a + b, b_in_sum = sum - a;
    const float lost_in_sum = (a - (sum - b_in_sum)) + (b - b_in_sum);  // exactly (Knuth's TwoSum)
    const float lost_in_products = fmaf(maximum, scale, -a) + fmaf(exponent, kLn2, -b);
    const float low_parts = maximum * scale_low + exponent * kLn2Low;
    const float lean = kEx2Lean * (1.0f - 1.0f / total);  // the maximum's own 2^0 = 1 is exact
    // `total` is relative to the rounded reference of `OnlineSoftmax::update`, not to maximum * scale_log2.
    const float lost_in_reference = kLn2 * fmaf(-maximum, scale_log2, mul_rn(maximum, scale_log2));
    return sum + (natural_log(fraction) + (lost_in_sum + lost_in_products + low_parts + lost_in_reference + lean));
}

// The state of a warp's rows. [i][h] belongs to row i*16 + h*8 + lane/4; the four lanes of a row hold the same maximum,
// and each the sum over its own columns until `finish` adds them up.
template <int kRowTiles>
struct OnlineSoftmax {
    float maximum[kRowTiles][2];  // of the raw scores
    float sum[kRowTiles][2];      // of exp2(scale_log2 * (score - maximum))
    float lost[kRowTiles][2];     // what the additions to `sum` rounded away (Dekker 1971): it adds up over many tiles

    __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                maximum[i][h] = -infinity();
                sum[i][h] = 0.0f;
                lost[i][h] = 0.0f;
            }
    }

    // Turns a tile of scores into probabilities relative to the new maximum, in place, and rescales what was summed before.
    template <int kKeyTiles, int kOutTiles>
    __device__ __forceinline__ void update(float (&scores)[kRowTiles][kKeyTiles][4], float (&out)[kRowTiles][kOutTiles][4],
                                           float scale_log2) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float highest = maximum[i][h];
#pragma unroll
                for (int j = 0; j < kKeyTiles; ++j) highest = fmaxf(highest, fmaxf(scores[i][j][h * 2], scores[i][j][h * 2 + 1]));
                highest = fmaxf(highest, shfl_sync_bfly(highest, 1));
                highest = fmaxf(highest, shfl_sync_bfly(highest, 2));
                // A row that has seen no key yet: its scores are all -inf, and -inf - (-inf) would be NaN.
                const float reference = highest == -infinity() ? 0.0f : mul_rn(highest, scale_log2);
                // The difference of two rounded products, so the factor is exactly 1 while the maximum stays.
                const float factor = ex2_approx_ftz(mul_rn(maximum[i][h], scale_log2) - reference);
                maximum[i][h] = highest;

                float partial = 0.0f;
#pragma unroll
                for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) {
                        scores[i][j][e] = ex2_approx_ftz(fmaf(scores[i][j][e], scale_log2, -reference));
                        partial += scores[i][j][e];
                    }
                const float factor_of_sum = fmaf(factor, kEx2Lean, factor);
                const float before = mul_rn(sum[i][h], factor_of_sum);
                sum[i][h] = before + partial;
                lost[i][h] = fmaf(lost[i][h], factor_of_sum, partial - (sum[i][h] - before));
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) out[i][j][e] *= factor;
            }
    }

    // Normalises the output and turns `sum` into the natural log-sum-exp of the scaled scores. The scale is given in two parts,
    // scale + scale_low, and as scale_log2 = scale * log2(e). A row that saw no key gets 0 and -inf.
    template <int kOutTiles>
    __device__ __forceinline__ void finish(float (&out)[kRowTiles][kOutTiles][4], float scale, float scale_low, float scale_log2) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float total = sum[i][h] + lost[i][h];
                total += shfl_sync_bfly(total, 1);
                total += shfl_sync_bfly(total, 2);
                const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
                sum[i][h] = total == 0.0f ? -infinity() : log_sum_exp(maximum[i][h], total, scale, scale_low, scale_log2);
#pragma unroll
                for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; ++e) out[i][j][e] *= inverse;
            }
    }
};

// From a warp's accumulator to memory: the output tile through shared memory, the log-sum-exp directly.

// Rounds the warp's rows into the tile, which starts at `first_row`.
template <class Element, int kRowTiles, int kOutTiles, int kRows, int kColumns>
__device__ __forceinline__ void stage_output(const SharedTile<kRows, kColumns>& tile, int first_row,
                                             const float (&out)[kRowTiles][kOutTiles][4]) {
    const int lane = lane_index();
    const auto place = tile.place(first_row + lane / 4, 0);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int j = 0; j < kOutTiles; ++j)
                store_shared(place.at(i * 16 + h * 8, j) + lane % 4 * 4,
                             cvt_rn_x2<Element>(out[i][j][h * 2], out[i][j][h * 2 + 1]));
}

// `lse` points at the tile's first row; one of the four lanes of a row writes.
template <int kRowTiles>
__device__ __forceinline__ void store_lse(float* lse, int first_row, int rows_valid, const float (&values)[kRowTiles][2]) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + i * 16 + h * 8 + lane / 4;
            if (lane % 4 == 0 && row < rows_valid) lse[row] = values[i][h];
        }
}

// ---- the kernel -------------------------------------------------------------------------------------------------------

using QueryTile = SharedTile<kBlockQ, kColumns>;
using KeyTile = SharedTile<kBlockKv, kColumns>;
using ValueTile = SharedTile<kBlockKv, kColumnsV>;
using OutTile = SharedTile<kBlockQ, kColumnsV>;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
attention_forward_fp16_d192x128_causal_bq128_bk32_w8_s1_qshared_bps1_sm_90a(const __grid_constant__ Parameters p) {
    const Work work = find_work<kCausal>(block_index(), (p.len_q + kBlockQ - 1) / kBlockQ, p.heads_q);
    const int first_query = work.query_tile * kBlockQ, queries = min(kBlockQ, p.len_q - first_query);
    const int head_kv = work.head / p.group;
    const int diagonal = p.len_kv - p.len_q;
    const KeyTiles key_tiles = find_key_tiles<kCausal, kBlockQ, kBlockKv>(first_query, p.len_kv, diagonal);

    const Element* q = sequence_rows(p.q, work.batch, p.q_batch, work.head, p.q_head) + first_query * p.q_row;
    const Element* k = sequence_rows(p.k, work.batch, p.k_batch, head_kv, p.k_head);
    const Element* v = sequence_rows(p.v, work.batch, p.v_batch, head_kv, p.v_head);
    Element* out = sequence_rows(p.out, work.batch, p.out_batch, work.head, p.out_head) + first_query * p.out_row;
    float* lse = p.lse + (static_cast<i64>(work.batch) * p.heads_q + work.head) * p.len_q + first_query;

    // Shared memory: Q, K ring, V ring; the output takes their place in the end.
    const QueryTile query_tile{shared_memory()};
    const SharedAddress key_ring = shared_memory() + QueryTile::kBytes;
    const SharedAddress value_ring = key_ring + kStages * KeyTile::kBytes;
    const OutTile out_tile{shared_memory()};
    const int first_row = warp_index() * kRowsPerWarp;

    // Key tiles are visited from the last to the first, so that the masked ones come first. Each load is a group of its own,
    // empty where there is no such tile, so that the number of groups under way never depends on the data.
    auto load_keys = [&](int tile, int slot) {
        const KeyTile destination{key_ring + slot * KeyTile::kBytes};
        const int first_key = tile * kBlockKv;
        if (tile >= 0) load_tile_async<kThreads, kHeadDim>(destination, k + first_key * p.k_row, p.k_row, p.len_kv - first_key);
        cp_async_commit_group();
    };
    auto load_values = [&](int tile, int slot) {
        const ValueTile destination{value_ring + slot * ValueTile::kBytes};
        const int first_key = tile * kBlockKv;
        if (tile >= 0) load_tile_async<kThreads, kHeadDimV>(destination, v + first_key * p.v_row, p.v_row, p.len_kv - first_key);
        cp_async_commit_group();
    };

    int tile = key_tiles.end - 1, slot = 0;
    const QueryInShared<kRowTiles, kBlockQ, kColumns> query_in_shared(query_tile, first_row);
    load_tile_async<kThreads, kHeadDim>(query_tile, q, p.q_row, queries);
    const auto& query = query_in_shared;
    load_keys(tile, 0);
#pragma unroll
    for (int ahead = 1; ahead < kStages; ++ahead) {
        load_values(tile - ahead + 1, ahead - 1);
        load_keys(tile - ahead, ahead);
    }

    OnlineSoftmax<kRowTiles> softmax;
    float accumulator[kRowTiles][kColumnsV / 8][4] = {};

    auto step = [&](bool masked) {
        float scores[kRowTiles][kBlockKv / 8][4];  // then probabilities, in place

        cp_async_wait_group<2 * kStages - 2>();
        barrier_sync();  // these keys are here, and nobody reads the values of the previous tile any more
        load_values(tile - kStages + 1, (slot + kStages - 1) % kStages);
        gemm_scores<Element>(scores, query, KeyTile{key_ring + slot * KeyTile::kBytes});

        if (masked) mask_scores<kCausal>(scores, first_query + first_row, tile * kBlockKv, p.len_kv, diagonal);
        softmax.update(scores, accumulator, p.scale_log2);

        cp_async_wait_group<2 * kStages - 2>();
        barrier_sync();  // these values are here, and nobody reads these keys any more
        load_keys(tile - kStages, slot);
        gemm_output<Element>(accumulator, scores, ValueTile{value_ring + slot * ValueTile::kBytes});

        slot = (slot + 1) % kStages;
    };
    for (; tile >= key_tiles.full; --tile) step(/*masked=*/true);
    for (; tile >= 0; --tile) step(/*masked=*/false);

    softmax.finish(accumulator, p.scale, p.scale_low, p.scale_log2);
    store_lse(lse, first_row, queries, softmax.sum);
    cp_async_wait_group<0>();
    barrier_sync();  // nobody reads shared memory any more, and nothing is on its way there
    stage_output<Element>(out_tile, first_row, accumulator);
    barrier_sync();
    store_tile<kThreads, kHeadDimV>(out, p.out_row, queries, out_tile);
}
