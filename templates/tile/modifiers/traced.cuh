// Functions of scores and masks that were traced, as a link of the chain. `Traced` is what came of them.

<%= traced %>
//% if bends
<%= traced_slope %>
//% endif
//% if traced_distances
<%= traced_distances %>
//% endif
//% if learns
<%= traced_gradients %>
//% endif
//% if traced_mask and not cached
<%= traced_tiles %>
// Of numbers that may be 0: then the other one.
__device__ __forceinline__ constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }
//% endif
struct TracedLink : HidesNothing<TracedLink> {
    static constexpr bool kHasHeads = true;
//% if traced_score
    static constexpr bool kAddsToScores = true;
//% endif
//% if traced_mask
    static constexpr bool kScatters = true;
//% endif
//% if bends
    static constexpr bool kBendsScores = true;
//% elif learns
    static constexpr bool kCollectsGradients = true;
//% endif
    Traced functions;
    float unit, per_unit;  // from scores as the product gives them to scaled ones, and back
    int batch, heads[2];   // heads: of a lane's rows lane/4 and lane/4 + 8
    int len_q;
//% if learns
    TracedSums sums;  // of gradients of captured tensors
//% endif

    template <class Parameters>
    __device__ __forceinline__ static TracedLink of(const Parameters& p, int len_q, int) {
//% if learns
        return {{}, traced_of(p), p.traced_unit, p.traced_per_unit, 0, {0, 0}, len_q, traced_sums_of(p)};
//% else
        return {{}, traced_of(p), p.traced_unit, p.traced_per_unit, 0, {0, 0}, len_q};
//% endif
    }
    __device__ __forceinline__ void load_heads(int entry, int first, int second) { batch = entry, heads[0] = first, heads[1] = second; }

//% if traced_score
    __device__ __forceinline__ float changed(float s, int query, int key) const { return changed(s, heads[0], query, key); }
    __device__ __forceinline__ float changed(float s, int head, int query, int key) const {
//% if traced_score == "added"
        s = fmaf(functions.added(0.0f, batch, head, query, key), per_unit, s);
//% elif traced_score == "bent"
        s = functions.bent(s * unit, batch, head, query, key) * per_unit;
//% endif
        return s;
    }
    template <class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ void add(float (&S)[kRowTiles][kTiles][4], RowOffset (&)[kRowTiles][2], const Position& position) const {
//% if traced_distances
        if constexpr (Position::kOneHead) {
            if (add_by_distance(S, position)) return;
        }
//% endif
        for_each(S, position, [&](float& s, int head, int query, int key) {
            // Of a query past the end a function may make NaN, and so would be its P, which is 0. Forward nobody has use for it.
            if (!Position::kRowsAreKeys || query < len_q) s = changed(s, head, query, key);
        });
    }
//% endif
//% if ahead
    template <int kRowTiles, int kTiles, class Position>
    __device__ __forceinline__ DistanceTerms<kRowTiles, kTiles> distance_terms(const Position& position) const {
        return DistanceTerms<kRowTiles, kTiles>::of(TracedDistances{functions}, position, batch, heads[0], len_q);
    }
//% endif
//% if traced_mask
    __device__ __forceinline__ bool visible(int query, int key) const { return functions.visible(batch, heads[0], query, key); }
    template <class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ void hide(float (&S)[kRowTiles][kTiles][4], const Position& position) const {
//% if cached
        // Rows are of any queries and heads.
        for_each(S, position, [&](float& s, int head, int query, int key) {
            if (!functions.visible(batch, head, query, key)) s = -infinity();
        });
    }
//% else
        constexpr bool kRowsAreKeys = Position::kRowsAreKeys;
        constexpr int kAlike = common_divisor((kRowsAreKeys ? TracedTiles::kAlikeQueries : TracedTiles::kAlikeKeys) / 8, kTiles);
        constexpr int kTogether = 8, kUnrolled = TracedTiles::kIsShort ? kTogether : 1;  // tiles of columns; 32 scores of a lane
        const TracedTiles tiles{functions};
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            TracedTiles::Parts parts;
#pragma unroll
            for (int first = 0; first < kTiles; first += kTogether) {
                u32 visible = 0;  // a bit for each score
#pragma unroll kUnrolled
                for (int j = first; j < min(first + kTogether, kTiles); ++j) {
                    if (j % 4 == 0) barrier_warp_sync();  // see for_each
                    if (j % kAlike == 0) {
                        const int row = position.first_row + i * 16, column = position.first_column + j * 8;
                        parts = tiles.parts_of(batch, heads[0], kRowsAreKeys ? column : row, kRowsAreKeys ? row : column);
                    }
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int row = position.row(i, e / 2), column = position.first_column + lane_index() % 4 * 2 + j * 8 + e % 2;
                        const int query = kRowsAreKeys ? column : row, key = kRowsAreKeys ? row : column;
                        visible |= static_cast<u32>(tiles.visible_beside(parts, batch, heads[0], query, key)) << (j - first) * 4 + e;
                    }
                }
#pragma unroll
                for (int j = first; j < min(first + kTogether, kTiles); ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if ((visible >> (j - first) * 4 + e & 1) == 0) S[i][j][e] = -infinity();
            }
        }
    }
    __device__ __forceinline__ SeenInTile seen_in(const TileBounds& tile) const {
        const TracedTiles tiles{functions};
        const SeenInTile seen = tiles.seen_in(batch, heads[0], tile);
        return tiles.kIsKnown || !seen.some || seen.all ? seen : look_at(*this, tile);
    }
//% endif
//% endif
//% if bends

    // For dS of scores as the functions leave them; where it is 0, whatever the derivative is, it stays so.
    template <int kRowTiles, int kTiles>
    __device__ __forceinline__ void unbend(float (&dS)[kRowTiles][kTiles][4], const float (&before)[kRowTiles][kTiles][4],
                                           const ScorePosition<true>& position) const {
//% if learns
        TracedGradients::add(functions, sums, dS, before, unit, position, batch, heads[0]);
//% endif
        const TracedSlope with_slope{functions};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            if (j % 2 == 0) barrier_warp_sync();
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int key = position.row(i, e / 2), query = position.first_column + lane_index() % 4 * 2 + j * 8 + e % 2;
                    if (dS[i][j][e] != 0.0f) dS[i][j][e] *= with_slope.slope(before[i][j][e] * unit, batch, heads[0], query, key);
                }
        }
    }
//% elif learns

    template <bool, int kRowTiles, int kTiles>
    __device__ __forceinline__ void collect(const float (&dS)[kRowTiles][kTiles][4], const ScorePosition<true>& position) const {
        // Nothing that is added depends on the score: dS stands for S.
        TracedGradients::add(functions, sums, dS, dS, unit, position, batch, heads[0]);
    }
//% endif

  private:
//% if traced_distances
    // Returns false, and adds nothing, where that cannot be.
    template <class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ bool add_by_distance(float (&S)[kRowTiles][kTiles][4], const Position& position) const {
        using Terms = DistanceTerms<kRowTiles, kTiles>;
        const TracedDistances own{functions};
        if (!Terms::can_know(own, position, batch, heads[0], len_q)) return false;
        Terms::for_each(own, position, batch, heads[0], [&](int n, int e, float term) {
            if (e == 0 && n % 4 == 0) barrier_warp_sync();  // see for_each
            Terms::add_to(S, n, e, term, per_unit);
        });
        return true;
    }
    template <class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ bool add_by_distance(float (&S)[kRowTiles][kTiles][4],
                                                    const PositionWithTerms<Position, DistanceTerms<kRowTiles, kTiles>>& position) const {
        if (position.terms.are_known) position.terms.add_to(S, per_unit);
        return position.terms.are_known;
    }
//% endif
    template <class Position, int kRowTiles, int kTiles, class Change>
    __device__ __forceinline__ void for_each(float (&S)[kRowTiles][kTiles][4], const Position& position, const Change& change) const {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            if (j % 2 == 0) barrier_warp_sync();  // else the compiler would load elements of all columns at once, into too many registers
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int row = position.row(i, e / 2), column = position.first_column + lane_index() % 4 * 2 + j * 8 + e % 2;
                    const int query = Position::kRowsAreKeys ? column : row, key = Position::kRowsAreKeys ? row : column;
                    change(S[i][j][e], heads[Position::kTwoHeads * (e / 2)], query, key);
                }
        }
    }
};
