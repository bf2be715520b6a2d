// Which scores count. A kernel asks one chain of links; each link is a struct with the functions of `SequenceEnd`, and what a link leaves
// alone costs nothing.

// Of the queries [begin, end) each may see some key of a tile, of [full_begin, full_end) each sees all of them. The others see none.
struct QueryRange {
    int begin, full_begin, full_end, end;
};

// A query sees no keys but these, and each of them unless a link hides it.
struct KeyRange {
    int begin, end;
};

// There are keys up to len_kv only. Query rows past len_q need no mask: their P is 0 whatever their scores are.
struct SequenceEnd {
    int len_q, len_kv;

    __device__ __forceinline__ bool visible(int, int key) const { return key < len_kv; }
    __device__ __forceinline__ KeyRange keys(int) const { return {0, len_kv}; }
    // For the keys [first_key, end_key).
    __device__ __forceinline__ QueryRange queries(int first_key, int end_key) const {
        return {0, end_key <= len_kv ? 0 : len_q, len_q, first_key < len_kv ? len_q : 0};
    }
};

struct NoMask {
    __device__ __forceinline__ bool visible(int, int) const { return true; }
    __device__ __forceinline__ KeyRange keys(int) const { return {0, 0x7fffffff}; }
    __device__ __forceinline__ QueryRange queries(int, int) const { return {0, 0, 0x7fffffff, 0x7fffffff}; }
};

// Query i sees the keys j <= i + causal_offset. Aligned bottom-right, causal_offset = len_kv - len_q.
struct Causal {
    int causal_offset;

    __device__ __forceinline__ bool visible(int query, int key) const { return key <= query + causal_offset; }
    __device__ __forceinline__ KeyRange keys(int query) const { return {0, query + causal_offset + 1}; }
    __device__ __forceinline__ QueryRange queries(int first_key, int end_key) const {
        return {max(0, first_key - causal_offset), max(0, end_key - 1 - causal_offset), 0x7fffffff, 0x7fffffff};
    }
};

// Query tiles [begin, end) see keys of a key tile; those outside [full_begin, full_end) need the mask.
struct QueryTileRange {
    int begin, full_begin, full_end, end;

    __device__ __forceinline__ int count() const { return max(0, end - begin); }
    __device__ __forceinline__ bool needs_mask(int tile) const { return tile < full_begin || tile >= full_end; }
};

template <class... Links>
struct ScoreChain : Links... {
    __device__ __forceinline__ bool visible(int query, int key) const { return (Links::visible(query, key) && ...); }

    // A tile is full up to the sequence's end: the last one may reach beyond it.
    template <int kBlockQ>
    __device__ __forceinline__ QueryTileRange query_tiles(int first_key, int end_key, int len_q) const {
        QueryRange all{0, 0, len_q, len_q};
        (intersect(all, Links::queries(first_key, end_key)), ...);
        return {all.begin / kBlockQ, (all.full_begin + kBlockQ - 1) / kBlockQ, all.full_end == len_q ? 0x7fffffff : all.full_end / kBlockQ,
                (all.end + kBlockQ - 1) / kBlockQ};
    }

  private:
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
