// Gradients of captured tensors: fp32 sums in memory, an element's after the other in the order of their indices. A part of a gradient is a
// struct: an element gains dS * `factor` of each score, and `position` says which one. kOnQuery, kOnKey: whether that depends on the query
// and on the key; what one element gets from a warp's scores is summed up before, where it does not. kSums: of which tensor it is.

template <class Element, int kRank, class... Indices>
__device__ __forceinline__ int position_in(const CapturedTensor<Element, kRank>& tensor, Indices... indices) {
    int position = 0;
    int dimension = 0;
    ((position = position * tensor.sizes[dimension] + tensor.in_range(indices, tensor.sizes[dimension]), ++dimension), ...);
    return position;
}

// dS: of the scores as the functions have left them. S: as these get them, in units of 1 / unit. Rows are keys. A score that has no part in
// its row adds nothing, whatever its factor is.
template <class Gradient, int kRowTiles, int kTiles>
__device__ __forceinline__ void add_gradient(const Gradient& gradient, float* sums, const float (&dS)[kRowTiles][kTiles][4],
                                             const float (&S)[kRowTiles][kTiles][4], float unit, const ScorePosition<true>& position,
                                             int batch, int head) {
    constexpr bool kOnQuery = Gradient::kOnQuery, kOnKey = Gradient::kOnKey;
    const int first_query = position.first_column + lane_index() % 4 * 2;
    float of_key[kRowTiles][2] = {}, of_all = 0.0f;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        if (j % 2 == 0) barrier_warp_sync();  // else the compiler would compute factors of all columns at once, into too many registers
        float of_query[2] = {};
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int key = position.row(i, e / 2), query = first_query + j * 8 + e % 2;
                if (dS[i][j][e] == 0.0f) continue;
                const float d = dS[i][j][e] * gradient.factor(S[i][j][e] * unit, batch, head, query, key);
                if constexpr (kOnQuery && kOnKey) red_add_f32(sums + gradient.position(batch, head, query, key), d);
                else if constexpr (kOnQuery) of_query[e % 2] += d;
                else if constexpr (kOnKey) of_key[i][e / 2] += d;
                else of_all += d;
            }
        if constexpr (kOnQuery && !kOnKey) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2) of_query[e] += shfl_sync_bfly(of_query[e], distance);
                const int query = first_query + j * 8 + e;
                if (lane_index() < 4 && of_query[e] != 0.0f)
                    red_add_f32(sums + gradient.position(batch, head, query, position.first_row), of_query[e]);
            }
        }
    }
    if constexpr (kOnKey && !kOnQuery) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float total = of_key[i][h];
                total += shfl_sync_bfly(total, 1);
                total += shfl_sync_bfly(total, 2);
                if (lane_index() % 4 == 0 && total != 0.0f)
                    red_add_f32(sums + gradient.position(batch, head, first_query, position.row(i, h)), total);
            }
    }
    if constexpr (!kOnKey && !kOnQuery) {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) of_all += shfl_sync_bfly(of_all, distance);
        if (lane_index() == 0 && of_all != 0.0f)
            red_add_f32(sums + gradient.position(batch, head, first_query, position.first_row), of_all);
    }
}

// All parts of all gradients. Sums: see `TracedSums`.
template <class... Gradients>
struct CapturedGradients {
    template <class Functions, class Sums, int kRowTiles, int kTiles>
    __device__ __forceinline__ static void add(const Functions& functions, const Sums& sums, const float (&dS)[kRowTiles][kTiles][4],
                                               const float (&S)[kRowTiles][kTiles][4], float unit, const ScorePosition<true>& position,
                                               int batch, int head) {
        if (sums.first[0] == nullptr) return;  // nobody wants them
        (add_gradient(Gradients{functions}, sums.first[Gradients::kSums], dS, S, unit, position, batch, head), ...);
    }
};
