// Gradients of tensors of which each score has an element: fp32 sums in memory, to which blocks add dS. A step is 0 where an element is
// that of many scores.
//
// Where each query and key has an element of its own, the sums of a head lie as warps hold dS^T: a unit is kUnitKeys keys by kUnitQueries
// queries, its sums are those of lane 0, 1, .., four each, and query_step and key_step are those of units. So a warp adds a unit at once.

struct ScoreSums {
    static constexpr int kUnitKeys = 16, kUnitQueries = 8, kUnit = kUnitKeys * kUnitQueries;
    float* first;
    i64 batch_step, head_step;
    int query_step, key_step, len_q, len_kv;
    float* of_head;

    // Adds a fragment whose rows are keys. kVectors: four numbers at once.
    template <bool kVectors, int kRowTiles, int kTiles>
    __device__ __forceinline__ void add(const float (&dS)[kRowTiles][kTiles][4], const ScorePosition<true>& position) const {
        if (query_step != 0 && key_step != 0) add_units<kVectors>(dS, position);
        else add_shared(dS, position);
    }

  private:
    // Units of queries past the end are not there; what else is past the end nobody reads.
    template <bool kVectors, int kRowTiles, int kTiles>
    __device__ __forceinline__ void add_units(const float (&dS)[kRowTiles][kTiles][4], const ScorePosition<true>& position) const {
        const int columns = len_q - position.first_column;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const int first_row = position.first_row + i * kUnitKeys;
            if (first_row >= len_kv) return;
            const i64 unit = static_cast<i64>(position.first_column / kUnitQueries) * query_step;
            float* own = of_head + unit + first_row / kUnitKeys * kUnit + lane_index() * 4;
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                if (j * kUnitQueries < columns) add_four<kVectors>(own, dS[i][j]);
                own += query_step;
                launder(own);  // else the compiler would keep the distances of all columns in registers
            }
        }
    }
    template <bool kVectors>
    __device__ __forceinline__ static void add_four(float* own, const float (&d)[4]) {
        if constexpr (kVectors) {
            red_add_f32_v4(own, d);
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) red_add_f32(own + e, d[e]);
        }
    }
    // Where an element is that of many scores. What it gets from a row is summed up before.
    template <int kRowTiles, int kTiles>
    __device__ __forceinline__ void add_shared(const float (&dS)[kRowTiles][kTiles][4], const ScorePosition<true>& position) const {
        const int column = position.first_column + lane_index() % 4 * 2, columns = len_q - column;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int key = position.row(i, h);
                float* own = of_head + static_cast<i64>(key) * key_step + static_cast<i64>(column) * query_step;
                if (query_step == 0) {
                    float total = 0.0f;
#pragma unroll
                    for (int j = 0; j < kTiles; ++j) total += dS[i][j][h * 2] + dS[i][j][h * 2 + 1];
                    total += shfl_sync_bfly(total, 1);
                    total += shfl_sync_bfly(total, 2);
                    if (key < len_kv && lane_index() % 4 == 0) red_add_f32(own, total);
                } else if (key < len_kv) {
#pragma unroll
                    for (int j = 0; j < kTiles; ++j) {
                        if (j * 8 < columns) red_add_f32(own, dS[i][j][h * 2]);
                        if (j * 8 + 1 < columns) red_add_f32(own + query_step, dS[i][j][h * 2 + 1]);
                        own += 8 * query_step;
                        launder(own);  // else the compiler would keep the distances of all columns in registers
                    }
                }
            }
    }
};

template <class Link, class = void>
constexpr bool kCollects = false;
template <class Link>
constexpr bool kCollects<Link, decltype(void(Link::kCollectsGradients))> = true;
template <bool kVectors, class Link, int kRowTiles, int kTiles>
__device__ __forceinline__ void collect_by(const Link& link, const float (&dS)[kRowTiles][kTiles][4], const ScorePosition<true>& position) {
    if constexpr (kCollects<Link>) link.template collect<kVectors>(dS, position);
}
// Hands dS, of the scores as links have left them and not scaled, to those that have gradients; one that bends scores has had its own.
// kVectors: whether the target adds four numbers at once.
template <bool kVectors, int kRowTiles, int kTiles, class... Links>
__device__ __forceinline__ void collect_gradients(const float (&dS)[kRowTiles][kTiles][4], const ScorePosition<true>& position,
                                                  const ScoreChain<Links...>& chain) {
    (collect_by<kVectors>(static_cast<const Links&>(chain), dS, position), ...);
}
