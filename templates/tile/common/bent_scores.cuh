// For gradients of scores that a link bends: what it adds depends on the score.

// One that bends scores (kBendsScores), the last of those that change them, has `unbend`: of dS by the scores as it leaves them it makes
// that by the scores as it gets them, which are kept for that.
template <class Link, class = void>
constexpr bool kBends = false;
template <class Link>
constexpr bool kBends<Link, decltype(void(Link::kBendsScores))> = true;
template <class Link, int kRowTiles, int kTiles>
__device__ __forceinline__ void keep_for(float (&before)[kRowTiles][kTiles][4], const float (&S)[kRowTiles][kTiles][4]) {
    if constexpr (kBends<Link>) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) before[i][j][e] = S[i][j][e];
    }
}
template <class Position, int kRowTiles, int kTiles, class... Links>
__device__ __forceinline__ void add_and_keep(float (&S)[kRowTiles][kTiles][4], float (&before)[kRowTiles][kTiles][4],
                                             const Position& position, const ScoreChain<Links...>& chain) {
    ((keep_for<Links>(before, S), add_whole_by(static_cast<const Links&>(chain), S, position)), ...);
}
template <class Link, int kRowTiles, int kTiles>
__device__ __forceinline__ void unbend_by(const Link& link, float (&dS)[kRowTiles][kTiles][4], const float (&before)[kRowTiles][kTiles][4],
                                          const ScorePosition<true>& position) {
    if constexpr (kBends<Link>) link.unbend(dS, before, position);
}
template <int kRowTiles, int kTiles, class... Links>
__device__ __forceinline__ void unbend(float (&dS)[kRowTiles][kTiles][4], const float (&before)[kRowTiles][kTiles][4],
                                       const ScorePosition<true>& position, const ScoreChain<Links...>& chain) {
    (unbend_by(static_cast<const Links&>(chain), dS, before, position), ...);
}
