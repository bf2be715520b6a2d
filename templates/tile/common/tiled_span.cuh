// Which rows of its key tiles are keys of a sequence in a cache, for kernels whose tiles come by tensor copies and are numbered from the
// sequence's begin on.

// Row r of the key tiles is at position first + r of the sequence's pages, and a key where it is in [front, end). Where a sequence has
// several pages its tiles begin where a box of tensor copies does, which may be before its first key. The chain counts keys as rows, so
// that its len_kv is `end`; FirstKeys hides those before `front`.
struct TiledSpan {
    int front, end, first;

    template <class Parameters>
    __device__ __forceinline__ static TiledSpan of(const Parameters& p, int batch) {
        const KeySpan span = CachedSequences::of(p).span(batch);
        const int first = divide(span.begin, p.border_reciprocal) * p.border;
        return {span.begin - first, span.end - first, first};
    }
    __device__ __forceinline__ static TiledSpan of(const uint4& v) {
        return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z)};
    }
    __device__ __forceinline__ uint4 vector() const {
        return {static_cast<u32>(front), static_cast<u32>(end), static_cast<u32>(first), 0};
    }
};

// A link of the chain: nobody sees the rows before the first key. Of the functions of a link it has the one that the forward pass calls.
struct FirstKeys {
    static constexpr bool kHidesFirstKeys = true;
    int front;

    __device__ __forceinline__ KeyRange keys(int) const { return {front, 0x7fffffff}; }
};

template <class... Links>
__device__ __forceinline__ ScoreChain<Links..., FirstKeys> with_first_keys(const ScoreChain<Links...>& chain, const TiledSpan& span) {
    return {static_cast<const Links&>(chain)..., {span.front}};
}
