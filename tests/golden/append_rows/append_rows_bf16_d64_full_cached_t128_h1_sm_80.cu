// append_rows_bf16_d64_full_cached_t128_h1_sm_80
//
// Writes new keys and values behind those that a cache has of their sequences, in its pages, rotates keys and queries by rotary position
// embedding, and tells how long sequences then are. A thread has 16 bytes of a token's row of each of some neighbouring heads, so that
// it loads their angles once.
//
//   problem  append_bf16_d64_full_cached
//   config   threads 128, heads 1
//   target   sm_80
//   launch   <<<1 + ceil(threads of all rows / 128), 128, 0 bytes>>>
//   parts    atoms/ptx: types, index, cvt, cvt_f32, mul
//            tile/common: tile_scheduler, element_16bit, rotary, appended_rows

// ==== atoms/ptx/types.cuh ============================================================================================

// Fixed-width integers and element types. NVRTC brings no headers, so neither <cstdint> nor <cuda_bf16.h> is there.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct Bf16 { u16 bits; };
struct Fp16 { u16 bits; };

// ==== atoms/ptx/index.cuh ============================================================================================

// Who a thread is. PTX ISA, "Special Registers": %tid, %ctaid.

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }

__device__ __forceinline__ int block_index() { return static_cast<int>(blockIdx.x); }

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

// ==== atoms/ptx/mul.cuh ==============================================================================================

// Products. PTX ISA, "mul".

// The upper 64 of the product's 128 bits.
__device__ __forceinline__ u64 mul_hi(u64 a, u64 b) { return __umul64hi(a, b); }

using Element = Bf16;

// ---- what this kernel is specialised for ------------------------------------------------------------------------------

constexpr int kThreads = 128, kBlocksPerSm = 1;
constexpr int kThreadHeads = 1;  // of a thread, at most
constexpr int kKeyChunks = 64 / 8, kValueChunks = 64 / 8;  // of a row

// Caches are [pages, page_size, heads_kv, columns], k_new and v_new [batch, new_keys, heads_kv, columns], q and q_rotated
// [batch, len_q, heads_q, columns], block_table [batch, table_pages], with strides in elements. key_threads, value_threads, query_threads:
// that keys, values and queries have, each for thread_heads heads; groups_kv, groups_q: groups of so many heads, of a token. x_reciprocal:
// for a division by x (see divide).
struct Parameters {
    Element* k_cache;
    Element* v_cache;
    const Element* k_new;
    const Element* v_new;
    const Element* q;
    Element* q_rotated;
    const Element* rotary_cos;
    const Element* rotary_sin;
    const float* rotary_cos_fp32;
    const float* rotary_sin_fp32;
    const int* cache_seqlens;
    const int* block_table;
    int* lengths;
    i64 k_cache_page;
    i64 k_cache_row;
    i64 k_cache_head;
    i64 v_cache_page;
    i64 v_cache_row;
    i64 v_cache_head;
    i64 k_new_batch;
    i64 k_new_row;
    i64 k_new_head;
    i64 v_new_batch;
    i64 v_new_row;
    i64 v_new_head;
    i64 q_batch;
    i64 q_row;
    i64 q_head;
    i64 q_rotated_batch;
    i64 q_rotated_row;
    i64 q_rotated_head;
    i64 table_batch;
    u64 groups_q_reciprocal;
    u64 groups_kv_reciprocal;
    u64 len_q_reciprocal;
    u64 new_keys_reciprocal;
    u64 page_size_reciprocal;
    int batch;
    int heads_q;
    int heads_kv;
    int groups_q;
    int groups_kv;
    int thread_heads;
    int len_q;
    int new_keys;
    int pages;
    int page_size;
    int table_pages;
    int key_threads;
    int value_threads;
    int query_threads;
    int rotary_dim;
    int rotary_positions;
    int rotary_interleaved;
    int rotary_by_query;
};

// ---- tile operations --------------------------------------------------------------------------------------------------

// ==== tile/common/tile_scheduler.cuh =================================================================================

// The tile scheduler: from a block's index, or that of a claimed tile, to its work tile.

// n / divisor, for n >= 0, given `reciprocal` = ceil(2^64 / divisor), or 0 for a divisor of 1 (Lemire, Kaser and Kurz 2019: exact for 32
// bits).
__device__ __forceinline__ int divide(int n, u64 reciprocal) { return reciprocal == 0 ? n : static_cast<int>(mul_hi(n, reciprocal)); }

// ==== tile/common/element_16bit.cuh ==================================================================================

// Single 16-bit elements as fp32 numbers.

__device__ __forceinline__ float load_element(const Element* at) {
    float value, nothing;
    cvt_f32_x2<Element>(value, nothing, at->bits);
    return value;
}

// ==== tile/common/rotary.cuh =========================================================================================

// Rotary position embedding (Su et al. 2021, "RoFormer"): pairs of columns are rotated by angles that grow with the row's position.

// A chunk is 8 neighbouring elements of a row, 16 bytes that begin at a multiple of 16.
struct Chunk {
    u32 pairs[4];

    __device__ __forceinline__ static Chunk load(const void* at) {
        const uint4 v = *reinterpret_cast<const uint4*>(at);
        return {{v.x, v.y, v.z, v.w}};
    }
    __device__ __forceinline__ void store(void* at) const { *reinterpret_cast<uint4*>(at) = {pairs[0], pairs[1], pairs[2], pairs[3]}; }
    __device__ __forceinline__ void unpack(float (&x)[8]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) cvt_f32_x2<Element>(x[2 * i], x[2 * i + 1], pairs[i]);
    }
};

// A table of cosines or sines, a row for each position; the one in fp32 is taken where both are there.
struct RotaryTable {
    const Element* elements;
    const float* fp32;

    __device__ __forceinline__ bool is_there() const { return elements != nullptr || fp32 != nullptr; }
    __device__ __forceinline__ float load(i64 at) const { return fp32 != nullptr ? fp32[at] : load_element(elements + at); }
    // 8 neighbours, at a multiple of 8.
    __device__ __forceinline__ void load_chunk(float (&x)[8], i64 at) const {
        if (fp32 == nullptr) return Chunk::load(elements + at).unpack(x);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Chunk four = Chunk::load(fp32 + at + i * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[i * 4 + j] = __uint_as_float(four.pairs[j]);
        }
    }
};

// Of the columns of a chunk: x becomes x * cosine + other * sine, where other is the column that x is a pair with.
struct RotaryAngles {
    float cosine[8], sine[8];
};

// The first `columns` columns are rotated, an even number: columns 2 j and 2 j + 1 as a pair (GPT-J), or j and j + columns / 2 (GPT-NeoX).
struct Rotary {
    RotaryTable cosines, sines;
    int columns, positions;  // rows of the tables
    bool interleaved;

    __device__ __forceinline__ static Rotary of(const Parameters& p) {
        const RotaryTable cosines{p.rotary_cos, p.rotary_cos_fp32}, sines{p.rotary_sin, p.rotary_sin_fp32};
        return {cosines, sines, p.rotary_dim, p.rotary_positions, p.rotary_interleaved != 0};
    }

    // Whether the chunk from column `first` on has columns that are rotated.
    __device__ __forceinline__ bool rotates(int first) const { return first < columns && cosines.is_there(); }
    // Whether all columns of any chunk that is rotated have their others in one chunk, in the same order.
    __device__ __forceinline__ bool in_chunks() const { return !interleaved && columns % 16 == 0; }

    // What the columns of a chunk of `row` are pairs with. Beyond the last column that is rotated it means nothing.
    __device__ __forceinline__ Chunk others(const Chunk& own, const Element* row, int first) const {
        const int half = columns / 2;
        if (in_chunks()) return Chunk::load(row + (first < half ? first + half : first - half));
        Chunk found;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 other[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = min(first + 2 * i + j, columns - 1);
                other[j] = interleaved ? 0 : row[column < half ? column + half : column - half].bits;
            }
            found.pairs[i] = interleaved ? own.pairs[i] << 16 | own.pairs[i] >> 16 : other[0] | other[1] << 16;
        }
        return found;
    }

    // For a row at this position.
    __device__ __forceinline__ RotaryAngles angles(int first, i64 position) const {
        const int half = columns / 2;
        const i64 row = min(position, i64{positions} - 1) * half;
        RotaryAngles found;
        if (in_chunks()) {
            const i64 at = row + (first < half ? first : first - half);
            cosines.load_chunk(found.cosine, at);
            sines.load_chunk(found.sine, at);
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int column = min(first + e, columns - 1);
            if (!in_chunks()) {
                const i64 at = row + (interleaved ? column / 2 : column < half ? column : column - half);
                found.cosine[e] = cosines.load(at);
                found.sine[e] = sines.load(at);
            }
            const bool is_second = interleaved ? e % 2 == 1 : column >= half;
            if (!is_second) found.sine[e] = -found.sine[e];
        }
        return found;
    }

    // Rotates a chunk. What is not rotated keeps its bits.
    __device__ __forceinline__ void rotate(Chunk& chunk, const Chunk& other, int first, const RotaryAngles& angles) const {
        float x[8], y[8];
        chunk.unpack(x);
        other.unpack(y);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = x[e] * angles.cosine[e] + y[e] * angles.sine[e];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + 2 * i < columns) chunk.pairs[i] = cvt_rn_x2<Element>(x[2 * i], x[2 * i + 1]);
    }
};

// ==== tile/common/appended_rows.cuh ==================================================================================

// Rows that are written to a cache, and rows of queries: which ones a thread works on, and where they go.

// What a sequence has: tokens, and heads of each, in groups of as many as a thread has. x_reciprocal: for a division by x (see divide).
struct TokenCounts {
    int tokens, heads, groups;
    u64 tokens_reciprocal, groups_reciprocal;

    __device__ __forceinline__ static TokenCounts of_new_keys(const Parameters& p) {
        return {p.new_keys, p.heads_kv, p.groups_kv, p.new_keys_reciprocal, p.groups_kv_reciprocal};
    }
    __device__ __forceinline__ static TokenCounts of_queries(const Parameters& p) {
        return {p.len_q, p.heads_q, p.groups_q, p.len_q_reciprocal, p.groups_q_reciprocal};
    }
};

// A thread's work: a chunk of a token's rows of neighbouring heads, at most kThreadHeads.
template <int kThreadHeads>
struct TokenHeads {
    int batch, token, head, heads, column;  // head: the first one

    // A row has kChunks chunks. Those of a row follow each other, groups of heads, tokens of a sequence, and sequences.
    template <int kChunks>
    __device__ __forceinline__ static TokenHeads of(int index, const TokenCounts& counts, int thread_heads) {
        const int group_of_all = index / kChunks, token_of_all = divide(group_of_all, counts.groups_reciprocal);
        const int batch = divide(token_of_all, counts.tokens_reciprocal);
        const int head = (group_of_all - token_of_all * counts.groups) * thread_heads;
        return {batch, token_of_all - batch * counts.tokens, head, min(thread_heads, counts.heads - head), index % kChunks * 8};
    }

    // Of rows: where that of the first head begins, and the stride between heads.
    __device__ __forceinline__ void load(Chunk (&chunks)[kThreadHeads], const Element* from, i64 stride) const {
#pragma unroll
        for (int h = 0; h < kThreadHeads; ++h)
            if (h < heads) chunks[h] = Chunk::load(from + h * stride + column);
    }
    __device__ __forceinline__ void store(Element* to, i64 stride, const Chunk (&chunks)[kThreadHeads]) const {
#pragma unroll
        for (int h = 0; h < kThreadHeads; ++h)
            if (h < heads) chunks[h].store(to + h * stride + column);
    }
    // Elements as a cache holds them: this is where they would be converted.
    __device__ __forceinline__ void store_to_cache(Element* to, i64 stride, const Chunk (&chunks)[kThreadHeads]) const {
        store(to, stride, chunks);
    }

    // Rotates chunks that were loaded from there, as those of rows at this position.
    __device__ __forceinline__ void rotate(Chunk (&chunks)[kThreadHeads], const Element* from, i64 stride, const Rotary& rotary,
                                           i64 position) const {
        if (!rotary.rotates(column)) return;
        Chunk others[kThreadHeads];
#pragma unroll
        for (int h = 0; h < kThreadHeads; ++h)
            if (h < heads) others[h] = rotary.others(chunks[h], from + h * stride, column);
        const RotaryAngles angles = rotary.angles(column, position);
#pragma unroll
        for (int h = 0; h < kThreadHeads; ++h)
            if (h < heads) rotary.rotate(chunks[h], others[h], column, angles);
    }
};

// Where a sequence of the cache has its keys: in the pages of its row of block_table, or without that in the page of its number alone.
struct CachePages {
    const int* table;
    i64 table_batch;  // stride
    int table_pages, pages, page_size;
    u64 page_size_reciprocal;

    __device__ __forceinline__ static CachePages of(const Parameters& p) {
        const int table_pages = p.block_table == nullptr ? min(p.table_pages, 1) : p.table_pages;  // a table without columns is null, too
        return {p.block_table, p.table_batch, table_pages, p.pages, p.page_size, p.page_size_reciprocal};
    }

    // Keys that a sequence may have.
    __device__ __forceinline__ i64 most() const { return i64{table_pages} * page_size; }

    // The row of a position in a cache; null where the sequence has no such position, or the table names a page that is not there.
    __device__ __forceinline__ Element* row(Element* cache, i64 page_stride, i64 row_stride, int batch, i64 position) const {
        if (position >= most()) return nullptr;
        const int of_table = divide(static_cast<int>(position), page_size_reciprocal);
        const int page = table == nullptr ? batch : table[batch * table_batch + of_table];
        if (page < 0 || page >= pages) return nullptr;
        return cache + page * page_stride + (static_cast<int>(position) - of_table * page_size) * row_stride;
    }
};

// ---- the kernel -------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
append_rows_bf16_d64_full_cached_t128_h1_sm_80(const __grid_constant__ Parameters p) {
    const CachePages cache = CachePages::of(p);
    if (block_index() == 0) {
        for (int batch = thread_index(); batch < p.batch; batch += kThreads)
            p.lengths[batch] = static_cast<int>(min(i64{max(p.cache_seqlens[batch], 0)} + p.new_keys, cache.most()));
        return;
    }

    using Heads = TokenHeads<kThreadHeads>;
    const Rotary rotary = Rotary::of(p);
    Chunk chunks[kThreadHeads];
    int index = (block_index() - 1) * kThreads + thread_index();
    if (index < p.key_threads) {
        const Heads of = Heads::of<kKeyChunks>(index, TokenCounts::of_new_keys(p), p.thread_heads);
        const Element* from = p.k_new + of.batch * p.k_new_batch + of.token * p.k_new_row + of.head * p.k_new_head;
        of.load(chunks, from, p.k_new_head);
        const i64 position = i64{max(p.cache_seqlens[of.batch], 0)} + of.token;
        Element* to = cache.row(p.k_cache, p.k_cache_page, p.k_cache_row, of.batch, position);
        of.rotate(chunks, from, p.k_new_head, rotary, position);
        if (to != nullptr) of.store_to_cache(to + of.head * p.k_cache_head, p.k_cache_head, chunks);
    } else if ((index -= p.key_threads) < p.value_threads) {
        const Heads of = Heads::of<kValueChunks>(index, TokenCounts::of_new_keys(p), p.thread_heads);
        const Element* from = p.v_new + of.batch * p.v_new_batch + of.token * p.v_new_row + of.head * p.v_new_head;
        of.load(chunks, from, p.v_new_head);
        const i64 position = i64{max(p.cache_seqlens[of.batch], 0)} + of.token;
        Element* to = cache.row(p.v_cache, p.v_cache_page, p.v_cache_row, of.batch, position);
        if (to != nullptr) of.store_to_cache(to + of.head * p.v_cache_head, p.v_cache_head, chunks);
    } else if ((index -= p.value_threads) < p.query_threads) {
        const Heads of = Heads::of<kKeyChunks>(index, TokenCounts::of_queries(p), p.thread_heads);
        const Element* from = p.q + of.batch * p.q_batch + of.token * p.q_row + of.head * p.q_head;
        Element* to = p.q_rotated + of.batch * p.q_rotated_batch + of.token * p.q_rotated_row + of.head * p.q_rotated_head;
        of.load(chunks, from, p.q_head);
        of.rotate(chunks, from, p.q_head, rotary, i64{max(p.cache_seqlens[of.batch], 0)} + (p.rotary_by_query != 0 ? of.token : 0));
        of.store(to, p.q_rotated_head, chunks);
    }
}
