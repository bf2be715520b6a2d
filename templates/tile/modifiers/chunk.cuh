// Chunks as a link of the chain: a query sees the keys of the chunk that its own position lies in. Positions of queries are aligned
// bottom-right; one below 0 is in no chunk.

struct Chunk {
    static constexpr bool kHidesFirstKeys = true;
    int causal_offset, size, multiplier, shift;

    template <class Parameters>
    __device__ __forceinline__ static Chunk of(const Parameters& p, int len_q, int len_kv) {
        return {len_kv - len_q, p.chunk, p.chunk_multiplier, p.chunk_shift};
    }
    // The first position of the chunk that a position from 0 to 2^30 - 1 lies in. The division is a product of 32-bit numbers (Granlund and
    // Montgomery 1994): for that of `divide`, of 64 bits, the backward kernels for Hopper have too few registers.
    __device__ __forceinline__ int first_of(int position) const {
        const u64 product = static_cast<u64>(4u * position) * static_cast<u32>(multiplier);
        return (static_cast<int>(product >> 32) >> shift) * size;
    }

    __device__ __forceinline__ bool visible(int query, int key) const {
        return static_cast<u32>(query - (first_of(key) - causal_offset)) < static_cast<u32>(size);
    }
    __device__ __forceinline__ KeyRange keys(int query) const {
        const int position = query + causal_offset, first = first_of(max(0, position));
        return {first, position < 0 ? 0 : first + size};
    }
    __device__ __forceinline__ QueryRange queries(int first_key, int end_key) const {
        const int first = first_of(first_key), last = first_of(end_key - 1);  // of the first and the last chunk that the tile meets
        const int begin = max(0, first - causal_offset), end = max(0, last + size - causal_offset);
        return {begin, begin, first == last ? end : 0, end};
    }
};
