// Small scores, whose map is close to a line, and can be a part of the exponential. For that a link that maps (kMapsScores) has
// `unit`, by which scores are multiplied first, in place, so that this takes no registers; then, of scores in that unit, `small_log2`,
// S * scale_log2 of a small score less a row max, which rises with any score, `change_unless_small` and `small_up_to`; and `small_sums`.

// Between which bounds sums of P relative to a row max of 0 say that all scores are small, or so low that they do not matter beside others:
// no score is above all that are small if the sum is less than `most`. If `most` is 0, no sum says so.
struct SmallSums {
    float least, most;

    // Whether both sums are from `least` on and below `most`. As integers, which order floats that are not negative, they take one
    // comparison: what is less, or no number, wraps around, or is high. Nothing hides how long this takes behind the last exponential.
    __device__ __forceinline__ bool have(float first, float second) const {
        const u32 bits = __float_as_uint(least);
        return max(__float_as_uint(first) - bits, __float_as_uint(second) - bits) < __float_as_uint(most) - bits;
    }
};

template <class Link>
__device__ __forceinline__ float small_unit_by(const Link& link) {
    if constexpr (kMaps<Link>) return link.unit;
    else return 1.0f;
}
template <class... Links>
__device__ __forceinline__ float small_unit(const ScoreChain<Links...>& chain) {
    return (small_unit_by(static_cast<const Links&>(chain)) * ...);
}
template <int kTiles>
__device__ __forceinline__ void multiply_scores(float (&S)[kTiles][4], float by) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) S[j][e] *= by;
}
// Whether all of a warp's scores are small, which are multiplied by `by` first; if not, they are mapped now.
template <class Link, int kTiles>
__device__ __forceinline__ bool map_unless_small_by(const Link& link, float (&S)[kTiles][4]) {
    if constexpr (kMaps<Link>) return link.change_unless_small(S);
    else return true;
}
template <int kTiles, class... Links>
__device__ __forceinline__ bool map_unless_small(float (&S)[kTiles][4], float by, const ScoreChain<Links...>& chain) {
    multiply_scores(S, by);
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
template <class Link>
__device__ __forceinline__ void small_sums_by(const Link& link, SmallSums& sums) {
    if constexpr (kMaps<Link>) sums = link.small_sums();
}
// Whether scores up to `highest`, to either side, are small.
template <class Link>
__device__ __forceinline__ bool small_up_to_by(const Link& link, float highest) {
    if constexpr (kMaps<Link>) return link.small_up_to(highest);
    else return true;
}
template <class... Links>
__device__ __forceinline__ bool small_up_to(float highest, const ScoreChain<Links...>& chain) {
    return (small_up_to_by(static_cast<const Links&>(chain), highest) && ...);
}
// Of the P that a lane has of a row of a K block.
template <class... Links>
__device__ __forceinline__ SmallSums small_sums(const ScoreChain<Links...>& chain) {
    SmallSums sums{};
    (small_sums_by(static_cast<const Links&>(chain), sums), ...);
    return sums;
}
