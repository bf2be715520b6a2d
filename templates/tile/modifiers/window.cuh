// A sliding window as a link of the chain.

// Query i sees the keys from i + first to i + last, both included.
struct Window {
    static constexpr bool kHidesFirstKeys = true;
    int len_q, first, last;

    // The window reaches `window_left` keys to the left and `window_right` to the right of the causal diagonal, aligned bottom-right.
    template <class Parameters>
    __device__ __forceinline__ static Window of(const Parameters& p, int len_q, int len_kv) {
        return {len_q, len_kv - len_q - p.window_left, len_kv - len_q + p.window_right};
    }

    // One comparison, without a sign: what is hidden on the left is a large number. Two would need registers for the ends of many queries.
    __device__ __forceinline__ bool visible(int query, int key) const {
        return static_cast<u32>(key - query - first) < static_cast<u32>(max(0, last - first + 1));
    }
    __device__ __forceinline__ KeyRange keys(int query) const { return {max(0, query + first), query + last + 1}; }
    __device__ __forceinline__ QueryRange queries(int first_key, int end_key) const {
        constexpr int kNever = 0x7fff0000;  // a first query behind all others, which a tile may be added to
        const int begin = max(0, first_key - last), end = max(0, end_key - first);
        const bool any = begin < len_q && first <= last;
        return {any ? begin : kNever, max(0, end_key - 1 - last), max(0, first_key - first + 1), end};
    }
};
