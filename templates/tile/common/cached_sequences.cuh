// Sequences whose keys lie in pages of a cache. How many keys each has, and in which pages, only the device knows. Tensors of keys have
// pages in place of a batch axis, so that a `batch` stride is the distance between pages.

// The positions [begin, end) of a sequence's keys among all that its pages have room for. Those before `begin` are padding; everything
// else counts keys from `begin` on.
struct KeySpan {
    int begin, end;

    __device__ __forceinline__ int length() const { return end - begin; }
};

// A position's page among those of its sequence, and its row within that page.
struct PageRow {
    int page, row;
};

// Has the functions of DenseSequences. Whatever the numbers in memory are, nothing outside of the tensors is read: lengths and padding are
// clamped to the room that there is, and pages to those of the cache.
struct CachedSequences {
    int query_length;           // of each sequence
    int heads_q, batch;
    int room;                   // keys that a sequence may have, at most
    int pages;                  // of the cache
    int page_size;              // keys of a page
    u64 page_size_reciprocal;   // see divide
    const int* lengths;         // of each sequence, with padding
    const int* padding;         // keys at the beginning that are none, or null
    const int* table;           // [batch, pages of a sequence]: which pages these are; null: sequence b has page b alone
    i64 table_row;              // stride of the table, in elements

    template <class Parameters>
    __device__ __forceinline__ static CachedSequences of(const Parameters& p) {
        return {p.len_q,
                p.heads_q,
                p.batch,
                p.block_table == nullptr ? min(p.page_size, p.len_kv) : p.len_kv,
                p.pages,
                p.page_size,
                p.page_size_reciprocal,
                p.cache_seqlens,
                p.cache_leftpad,
                p.block_table,
                p.block_table_row};
    }

    __device__ __forceinline__ KeySpan span(int batch) const { return clamped(lengths[batch], padding == nullptr ? 0 : padding[batch]); }
    // `padded`: keys at the beginning that are none.
    __device__ __forceinline__ KeySpan clamped(int length, int padded) const {
        const int end = min(max(length, 0), room);
        return {min(max(padded, 0), end), end};
    }
    __device__ __forceinline__ int len_q(int) const { return query_length; }
    __device__ __forceinline__ int len_kv(int batch) const { return span(batch).length(); }

    __device__ __forceinline__ PageRow page_row(int position) const {
        const int page = divide(position, page_size_reciprocal);
        return {page, position - page * page_size};
    }
    // Where the table says which page that is. There must be a table, and a key at the position.
    __device__ __forceinline__ const int* entry(int batch, const PageRow& at) const { return table + batch * table_row + at.page; }
    // The page that an entry stands for. Without a table the entry of a sequence is its number.
    __device__ __forceinline__ int page_of(int entry) const { return min(max(entry, 0), pages - 1); }

    template <class Element>
    __device__ __forceinline__ Element* query_row(Element* tensor, const Strides& strides, int batch, int head, int row) const {
        return tensor + batch * strides.batch + head * strides.head + row * strides.row;
    }
    // A row of a page, given the page's entry.
    template <class Element>
    __device__ __forceinline__ Element* key_row(Element* tensor, const Strides& strides, int entry, int head, int row) const {
        return tensor + page_of(entry) * strides.batch + head * strides.head + row * strides.row;
    }
    // Where a head's first query lies in lse: [batch, heads_q, len_q], dense.
    __device__ __forceinline__ i64 lse_offset(int batch, int head) const {
        return (static_cast<i64>(batch) * heads_q + head) * query_length;
    }
};
