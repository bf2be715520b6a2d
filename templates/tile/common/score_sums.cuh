// Gradients of tensors of which each score has an element: fp32 sums in memory, to which blocks add dS. A step is 0 where an element is
// that of many scores.

struct ScoreSums {
    float* first;
    i64 batch_step, head_step;
    int query_step, key_step, len_q, len_kv;
    float* of_head;

    // Adds a fragment whose rows are keys. What one element gets from a row of it is summed up before.
    template <int kRowTiles, int kTiles>
    __device__ __forceinline__ void add(const float (&dS)[kRowTiles][kTiles][4], const ScorePosition<true>& position) const {
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
template <class Link, int kRowTiles, int kTiles>
__device__ __forceinline__ void collect_by(const Link& link, const float (&dS)[kRowTiles][kTiles][4], const ScorePosition<true>& position) {
    if constexpr (kCollects<Link>) link.collect(dS, position);
}
// Hands dS, of the scores as links have left them and not scaled, to those that have gradients; one that bends scores has had its own.
template <int kRowTiles, int kTiles, class... Links>
__device__ __forceinline__ void collect_gradients(const float (&dS)[kRowTiles][kTiles][4], const ScorePosition<true>& position,
                                                  const ScoreChain<Links...>& chain) {
    (collect_by(static_cast<const Links&>(chain), dS, position), ...);
}
