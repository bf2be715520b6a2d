// What links of the chain make of scores before others hide some of them, in the order of composition. A link that maps scores
// (kMapsScores) has `change`, of a fragment, `changed`, of one score, and `derivative`, by what came of a score. One that adds to them
// (kAddsToScores) has `changed`, and `add`, which may leave to the caller what is the same in all of a lane's columns of a row; one that
// does (kLeavesOffsets) has `add_whole`, too, which leaves nothing.

// What a link has that hides no key. Each has one of its own, as a chain may have several.
template <class Link>
struct HidesNothing {
    static constexpr bool kHidesFirstKeys = false;

    __device__ __forceinline__ bool visible(int, int) const { return true; }
    __device__ __forceinline__ KeyRange keys(int) const { return {0, 0x7fffffff}; }
    __device__ __forceinline__ QueryRange queries(int, int) const { return {0, 0, 0x7fffffff, 0x7fffffff}; }
};

// Where a warp's fragment of scores lies: positions of its first row and column. Rows are queries, kPack for each, or keys.
template <bool kKeysAsRows, int kPack = 1>
struct ScorePosition {
    static constexpr bool kRowsAreKeys = kKeysAsRows, kTwoHeads = kPack > 8;  // kTwoHeads: of a lane's rows lane/4 and lane/4 + 8
    static constexpr bool kOneHead = kPack == 1;
    int first_row, first_column;

    __device__ __forceinline__ int row(int i, int h) const { return (first_row + i * 16 + h * 8 + lane_index() / 4) / kPack; }
    __device__ __forceinline__ int first_row_of_warp() const { return first_row / kPack; }
    template <int kRowTiles>
    __device__ __forceinline__ int last_row_of_warp() const {
        return (first_row + kRowTiles * 16 - 1) / kPack;
    }
};

template <class Link, class = void>
constexpr bool kMaps = false;
template <class Link>
constexpr bool kMaps<Link, decltype(void(Link::kMapsScores))> = true;
template <class Link, class = void>
constexpr bool kAdds = false;
template <class Link>
constexpr bool kAdds<Link, decltype(void(Link::kAddsToScores))> = true;
template <class Link, class = void>
constexpr bool kLeaves = false;
template <class Link>
constexpr bool kLeaves<Link, decltype(void(Link::kLeavesOffsets))> = true;
template <class Link, class = void>
constexpr bool kKnowsHeads = false;
template <class Link>
constexpr bool kKnowsHeads<Link, decltype(void(Link::kHasHeads))> = true;

// The chain for scores of a head; of two, for a lane's rows lane/4 and lane/4 + 8.
template <class Link>
__device__ __forceinline__ void load_heads(Link& link, int batch, int first, int second) {
    if constexpr (kKnowsHeads<Link>) link.load_heads(batch, first, second);
}
template <class... Links>
__device__ __forceinline__ ScoreChain<Links...> of_heads(ScoreChain<Links...> chain, int batch, int first, int second) {
    (load_heads(static_cast<Links&>(chain), batch, first, second), ...);
    return chain;
}
template <class... Links>
__device__ __forceinline__ ScoreChain<Links...> of_head(const ScoreChain<Links...>& chain, int batch, int head) {
    return of_heads(chain, batch, head, head);
}

// For a Q tile: under PackGQA its rows are of kPack heads in turn.
template <int kPack, class... Links>
__device__ __forceinline__ ScoreChain<Links...> of_packed_heads(const ScoreChain<Links...>& chain, int batch, int first_head) {
    const int row = lane_index() / 4;
    return of_heads(chain, batch, first_head + row % kPack, first_head + (row + 8) % kPack);
}

// The links that map scores, and those that add to what these leave.
template <class Link, class Position, int kRowTiles, int kTiles>
__device__ __forceinline__ void map_by(const Link& link, float (&S)[kRowTiles][kTiles][4], const Position& position) {
    if constexpr (kMaps<Link>) link.change(S, position);
}
template <class Position, int kRowTiles, int kTiles, class... Links>
__device__ __forceinline__ void map_scores(float (&S)[kRowTiles][kTiles][4], const Position& position, const ScoreChain<Links...>& chain) {
    (map_by(static_cast<const Links&>(chain), S, position), ...);
}
// What is still to be added to a lane's columns of a row: factor * distance, with the factor in two floats. It is the same for many keys,
// whose rounding errors would not cancel: so it meets a row max or log-sum-exp first, which is often near it.
struct RowOffset {
    float factor, factor_low, distance;

    __device__ __forceinline__ float value() const { return fmaf(factor, distance, factor_low * distance); }
    __device__ __forceinline__ float log2_less(float row_max, float scale_log2) const {
        const float high = mul_rn(factor, scale_log2), low = fmaf(factor, scale_log2, -high) + factor_low * scale_log2;
        return fmaf(distance, low, fmaf(distance, high, -row_max));
    }
};

template <class Link, class Position, int kRowTiles, int kTiles>
__device__ __forceinline__ void add_by(const Link& link, float (&S)[kRowTiles][kTiles][4], RowOffset (&offset)[kRowTiles][2],
                                       const Position& position) {
    if constexpr (kAdds<Link>) link.add(S, offset, position);
}
template <class Position, int kRowTiles, int kTiles, class... Links>
__device__ __forceinline__ void add_terms(float (&S)[kRowTiles][kTiles][4], RowOffset (&offset)[kRowTiles][2], const Position& position,
                                          const ScoreChain<Links...>& chain) {
    (add_by(static_cast<const Links&>(chain), S, offset, position), ...);
}
// Adds the offsets, which are 0 then.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void add_offsets(float (&S)[kRowTiles][kTiles][4], RowOffset (&offset)[kRowTiles][2]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) S[i][j][e] += offset[i][e / 2].value();
        offset[i][0].distance = offset[i][1].distance = 0.0f;
    }
}
template <class Position, int kRowTiles, int kTiles, class... Links>
__device__ __forceinline__ void add_scores(float (&S)[kRowTiles][kTiles][4], const Position& position, const ScoreChain<Links...>& chain) {
    RowOffset offset[kRowTiles][2] = {};
    add_terms(S, offset, position, chain);
    if constexpr ((kLeaves<Links> || ...)) add_offsets(S, offset);
}
// Adds all at once, rounded once: for lse.
template <class Link, class Position, int kRowTiles, int kTiles>
__device__ __forceinline__ void add_whole_by(const Link& link, float (&S)[kRowTiles][kTiles][4], const Position& position) {
    if constexpr (kLeaves<Link>) {
        link.add_whole(S, position);
    } else if constexpr (kAdds<Link>) {
        RowOffset none[kRowTiles][2] = {};
        link.add(S, none, position);
    }
}
template <class Position, int kRowTiles, int kTiles, class... Links>
__device__ __forceinline__ void change_scores(float (&S)[kRowTiles][kTiles][4], const Position& position,
                                              const ScoreChain<Links...>& chain) {
    map_scores(S, position, chain);
    add_scores(S, position, chain);
}
template <class Position, int kRowTiles, int kTiles, class... Links>
__device__ __forceinline__ void change_scores_at_once(float (&S)[kRowTiles][kTiles][4], const Position& position,
                                                      const ScoreChain<Links...>& chain) {
    map_scores(S, position, chain);
    (add_whole_by(static_cast<const Links&>(chain), S, position), ...);
}
//% if early

// Has links load what they have in memory of a fragment, before its scores are there.
template <class Link, class = void>
constexpr bool kLoads = false;
template <class Link>
constexpr bool kLoads<Link, decltype(void(Link::kLoadsAhead))> = true;
template <int kTiles, class Link, class Position>
__device__ __forceinline__ void load_by(Link& link, const Position& position) {
    if constexpr (kLoads<Link>) link.template load_ahead<kTiles>(position);
}
template <int kTiles, class Position, class... Links>
__device__ __forceinline__ void load_ahead(ScoreChain<Links...>& chain, const Position& position) {
    (load_by<kTiles>(static_cast<Links&>(chain), position), ...);
}
//% endif
//% if looks and at_once

// The same of links that few fragments ask (kLooks), while a fragment's keys are on their way.
template <class Link, class = void>
constexpr bool kLooksAt = false;
template <class Link>
constexpr bool kLooksAt<Link, decltype(void(Link::kLooks))> = true;
template <int kTiles, class Link, class Position>
__device__ __forceinline__ void look_by(Link& link, const Position& position) {
    if constexpr (kLooksAt<Link>) link.template look<kTiles>(position);
}
template <int kTiles, class Position, class... Links>
__device__ __forceinline__ void look(ScoreChain<Links...>& chain, const Position& position) {
    (look_by<kTiles>(static_cast<Links&>(chain), position), ...);
}
//% endif

// One score, of a query and a key.
template <class Link>
__device__ __forceinline__ float changed_by(const Link& link, float s, int query, int key) {
    if constexpr (kMaps<Link> || kAdds<Link>) return link.changed(s, query, key);
    else return s;
}
template <class... Links>
__device__ __forceinline__ float changed_score(float s, int query, int key, const ScoreChain<Links...>& chain) {
    ((s = changed_by(static_cast<const Links&>(chain), s, query, key)), ...);
    return s;
}
// The same of one that `map_scores` has mapped.
template <class Link>
__device__ __forceinline__ float added_by(const Link& link, float s, int query, int key) {
    if constexpr (kAdds<Link>) return link.changed(s, query, key);
    else return s;
}
template <class... Links>
__device__ __forceinline__ float added_score(float s, int query, int key, const ScoreChain<Links...>& chain) {
    ((s = added_by(static_cast<const Links&>(chain), s, query, key)), ...);
    return s;
}

// The derivative of what maps a score, by what has come of it. One link at most maps.
template <class Link>
__device__ __forceinline__ float derivative_by(const Link& link, float mapped) {
    if constexpr (kMaps<Link>) return link.derivative(mapped);
    else return 1.0f;
}
template <class... Links>
__device__ __forceinline__ float score_derivative(float mapped, const ScoreChain<Links...>& chain) {
    return (derivative_by(static_cast<const Links&>(chain), mapped) * ...);
}
