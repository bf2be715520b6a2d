// A prefix as a link of the chain: every query of an entry of the batch sees its first keys, whatever hides them (prefix-LM). Links of a
// chain can only hide more: so this one holds the causal mask and all links that hide keys, and shows what they or the prefix show.

template <bool kCausal, class... Links>
struct Prefix {
    using Others = decltype(with_links(make_chain<kCausal>(0, 0), Links{}...));
    static constexpr bool kHidesFirstKeys = Others::kHidesFirstKeys;
    const int* lengths;  // [batch]
    int len_kv, prefix;  // prefix: keys of that of an entry, once `load_batch` has read it; below 0 for none, too
    Others others;

    template <class Parameters>
    __device__ __forceinline__ static Prefix of(const Parameters& p, int len_q, int len_kv) {
        return {p.prefix_len, len_kv, 0, modified_chain<kCausal, Links...>(p, len_q, len_kv)};
    }
    __device__ __forceinline__ void load_batch(int batch) { prefix = min(lengths[batch], len_kv); }

    __device__ __forceinline__ bool visible(int query, int key) const { return key < prefix || others.visible(query, key); }
    // From the first key that the others show: a query sees the prefix, too.
    __device__ __forceinline__ KeyRange keys(int query) const {
        const KeyRange seen = others.keys(query);
        return {seen.begin, max(seen.end, prefix)};
    }
    // The queries that see a key.
    __device__ __forceinline__ QueryRange queries_of(int key) const {
        if (key < prefix) return {0, 0, 0x7fffffff, 0x7fffffff};
        return others.queries(key, key + 1);
    }
    // With a prefix all later queries count that see none of the keys, as if they saw what lies between the prefix and the keys that the
    // others show them: the key tiles that add to a query tile then have no gaps (semaphore.cuh).
    __device__ __forceinline__ QueryRange queries(int first_key, int end_key) const {
        if (end_key <= prefix) return {0, 0, 0x7fffffff, 0x7fffffff};
        const QueryRange seen = others.queries(first_key, end_key);
        return {first_key < prefix ? 0 : seen.begin, seen.full_begin, seen.full_end, prefix > 0 ? 0x7fffffff : seen.end};
    }
};

// The chain for an entry of the batch.
template <class Chain>
__device__ __forceinline__ Chain of_batch(Chain chain, int batch) {
    chain.load_batch(batch);
    return chain;
}
