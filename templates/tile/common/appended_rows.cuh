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
//% if e4m3
    // Elements as a cache holds them: divided by the descale of their head, rounded, and at most the largest one. `descales`: that of the
    // first head, or null.
    __device__ __forceinline__ void store_to_cache(E4m3Pair* to, i64 stride, const Chunk (&chunks)[kThreadHeads], const float* descales,
                                                   i64 descale_stride) const {
#pragma unroll
        for (int h = 0; h < kThreadHeads; ++h) {
            if (h >= heads) continue;
            const float given = descales == nullptr ? 1.0f : descales[h * descale_stride];
            const float descale = given == 0.0f ? 1.0f : given;  // of a head of zeros, which stay what they are
            float x[8];
            chunks[h].unpack(x);
            u64 eight = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                eight |= static_cast<u64>(cvt_rn_satfinite_e4m3x2(x[2 * i] / descale, x[2 * i + 1] / descale)) << i * 16;
            *reinterpret_cast<u64*>(to + h * stride + column / 2) = eight;
        }
    }

//% else
    // Elements as a cache holds them: this is where they would be converted.
    __device__ __forceinline__ void store_to_cache(Element* to, i64 stride, const Chunk (&chunks)[kThreadHeads]) const {
        store(to, stride, chunks);
    }

//% endif
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
//% if e4m3
    __device__ __forceinline__ E4m3Pair* row(E4m3Pair* cache, i64 page_stride, i64 row_stride, int batch, i64 position) const {
//% else
    __device__ __forceinline__ Element* row(Element* cache, i64 page_stride, i64 row_stride, int batch, i64 position) const {
//% endif
        if (position >= most()) return nullptr;
        const int of_table = divide(static_cast<int>(position), page_size_reciprocal);
        const int page = table == nullptr ? batch : table[batch * table_batch + of_table];
        if (page < 0 || page >= pages) return nullptr;
        return cache + page * page_stride + (static_cast<int>(position) - of_table * page_size) * row_stride;
    }
};
