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

//% if scatters
// Whether a link is a scattered mask: see seen_tiles.cuh.
template <class Link, class = void>
constexpr bool kIsScattered = false;
template <class Link>
constexpr bool kIsScattered<Link, decltype(void(Link::kScatters))> = true;

//% endif
template <class... Links>
struct ScoreChain : Links... {
    static constexpr bool kHidesFirstKeys = (Links::kHidesFirstKeys || ...);  // else the range of every query's keys begins at 0

    __device__ __forceinline__ bool visible(int query, int key) const { return (Links::visible(query, key) && ...); }
//% if scatters
    // The same but for scattered masks.
    __device__ __forceinline__ bool in_ranges(int query, int key) const {
        return ((kIsScattered<Links> || Links::visible(query, key)) && ...);
    }
//% endif
//% if by_key
    // The queries that see any of the keys [first_key, end_key), and those that see all of them.
    __device__ __forceinline__ QueryRange queries(int first_key, int end_key) const {
        QueryRange all{0, 0, 0x7fffffff, 0x7fffffff};
        (intersect(all, Links::queries(first_key, end_key)), ...);
        return all;
    }
//% endif
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
//% if opens
        const int begin = this->prefix > 0 ? 0 : of_first.begin;  // what lies between a prefix and other keys is visited, too
        return {begin / kBlockKv, (of_last.begin + kBlockKv - 1) / kBlockKv, (first_end - (first_end < last_end)) / kBlockKv,
                (last_end + kBlockKv - 1) / kBlockKv};
//% else
        return {of_first.begin / kBlockKv, (of_last.begin + kBlockKv - 1) / kBlockKv, (first_end - (first_end < last_end)) / kBlockKv,
                (last_end + kBlockKv - 1) / kBlockKv};
//% endif
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
