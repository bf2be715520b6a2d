// The chain of a problem with modifiers, each of which is a link behind those of a plain problem.

template <class... Links, class... More>
__device__ __forceinline__ ScoreChain<Links..., More...> with_links(const ScoreChain<Links...>& chain, const More&... more) {
    return {static_cast<const Links&>(chain)..., more...};
}

// `Modifiers` are the links, in the order of composition.
template <bool kCausal, class... Modifiers, class Parameters>
__device__ __forceinline__ auto modified_chain(const Parameters& p, int len_q, int len_kv) {
    return with_links(make_chain<kCausal>(len_q, len_kv), Modifiers::of(p, len_q, len_kv)...);
}
