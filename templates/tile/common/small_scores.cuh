// Small scores, whose map is close to a line, and can be a part of the exponential: S * scale_log2 is then small_log2. For that a link that
// maps (kMapsScores) has `below_reach`, whose highest bit says whether a score is small, and of that `small_slope_log2`, by which the score
// is multiplied; and `change_unless_small`.

constexpr u32 kHighestBit = 0x80000000;  // what `all_small` is at first, of scores that are asked one after the other

// Whether all of a warp's scores are small; if not, they are mapped now.
template <class Link, int kTiles>
__device__ __forceinline__ bool map_unless_small_by(const Link& link, float (&S)[kTiles][4]) {
    if constexpr (kMaps<Link>) return link.change_unless_small(S);
    else return true;
}
template <int kTiles, class... Links>
__device__ __forceinline__ bool map_unless_small(float (&S)[kTiles][4], const ScoreChain<Links...>& chain) {
    return (map_unless_small_by(static_cast<const Links&>(chain), S) && ...);
}
template <class Link>
__device__ __forceinline__ float slope_by(const Link& link, float s, u32& all_small) {
    if constexpr (kMaps<Link>) {
        const float below = link.below_reach(s);
        all_small &= __float_as_uint(below);
        return link.small_slope_log2(below);
    } else {
        return 1.0f;
    }
}
// The base-2 exponent of a small score, less `row_max`: S * slope - row_max. `all_small` loses its highest bit if the score is not small.
template <class... Links>
__device__ __forceinline__ float small_log2(float s, float row_max, const ScoreChain<Links...>& chain, u32& all_small) {
    return fmaf(s, (slope_by(static_cast<const Links&>(chain), s, all_small) * ...), -row_max);
}
