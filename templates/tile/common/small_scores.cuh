// Small scores, whose map is close to a line, and can be a part of the exponential. For that a link that maps (kMapsScores) has
// `small_log2`, S * scale_log2 of a small score less a row max, which rises with any score; `small_sums`; and `change_unless_small`.

// Between which bounds sums of P relative to a row max of 0 say that all scores are small, or so low that they do not matter beside others:
// no score is above all that are small if the sum is less than `most`. If `most` is 0, no sum says so.
struct SmallSums {
    float least, most;

    __device__ __forceinline__ bool has(float total) const { return total >= least && total < most; }
};

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
// The base-2 exponent of a small score, less `row_max`.
template <class Link>
__device__ __forceinline__ float small_log2_by(const Link& link, float s, float row_max) {
    if constexpr (kMaps<Link>) return link.small_log2(s, row_max);
    else return 1.0f;
}
template <class... Links>
__device__ __forceinline__ float small_log2(float s, float row_max, const ScoreChain<Links...>& chain) {
    return (small_log2_by(static_cast<const Links&>(chain), s, row_max) * ...);
}
// Of the P of `count` scores.
template <class Link>
__device__ __forceinline__ void small_sums_by(const Link& link, int count, SmallSums& sums) {
    if constexpr (kMaps<Link>) sums = link.small_sums(count);
}
template <class... Links>
__device__ __forceinline__ SmallSums small_sums(int count, const ScoreChain<Links...>& chain) {
    SmallSums sums{};
    (small_sums_by(static_cast<const Links&>(chain), count, sums), ...);
    return sums;
}
