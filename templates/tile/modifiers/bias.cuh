// A bias in memory as a link of the chain: each score gains an element of it. T: of its elements, fp32 or 16 bits.

__device__ __forceinline__ float as_float(float element) { return element; }
template <class Element>
__device__ __forceinline__ float as_float(Element element) {
    float low, high;
    cvt_f32_x2<Element>(low, high, element.bits);
    return low;
}

template <class T>
//% if fetches
struct Bias : HidesNothing<Bias<T>>, FetchedTensor<T> {
//% else
struct Bias : HidesNothing<Bias<T>>, ScoreTensor<T> {
//% endif
    static constexpr bool kAddsToScores = true, kHasHeads = true;
//% if early
    static constexpr bool kLoadsAhead = true;
//% endif
    float per_unit;  // from the bias to scores as the product gives them
//% if collects
    static constexpr bool kCollectsGradients = true;
    ScoreSums sums;  // of its gradient
//% endif

    template <class Parameters>
    __device__ __forceinline__ static Bias of(const Parameters& p, int len_q, int len_kv) {
//% if packed
        len_q = min(len_q, p.bias_len_q), len_kv = min(len_kv, p.bias_len_kv);
        return {{},
                {reinterpret_cast<const T*>(p.bias), p.bias_batch, p.bias_head, p.bias_query, p.bias_key, len_q, len_kv, p.bias_len_kv, {}},
//% else
        return {{},
                {reinterpret_cast<const T*>(p.bias), p.bias_batch, p.bias_head, p.bias_query, p.bias_key, len_q, len_kv, {}},
//% endif
//% if collects
                p.bias_per_unit,
                {p.d_bias_sum, p.d_bias_sum_batch, p.d_bias_sum_head, p.d_bias_sum_query, p.d_bias_sum_key, len_q, len_kv, nullptr}};
//% else
                p.bias_per_unit};
//% endif
    }
    __device__ __forceinline__ float changed(float s, int query, int key) const {
        return fmaf(as_float(this->at(query, key)), per_unit, s);
    }

    template <class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ void add(float (&S)[kRowTiles][kTiles][4], RowOffset (&)[kRowTiles][2], const Position& position) const {
        this->for_each(S, position, [&](float& s, T element) { s = fmaf(as_float(element), per_unit, s); });
    }
//% if collects

    __device__ __forceinline__ void load_heads(int batch, int first, int second) {
        ScoreTensor<T>::load_heads(batch, first, second);
        sums.of_head = sums.first == nullptr ? nullptr : sums.first + batch * sums.batch_step + first * sums.head_step;
    }
    template <bool kVectors, int kRowTiles, int kTiles>
    __device__ __forceinline__ void collect(const float (&dS)[kRowTiles][kTiles][4], const ScorePosition<true>& position) const {
        if (sums.of_head != nullptr) sums.add<kVectors>(dS, position);
    }
//% endif
};
//% if collects

template <int kThreads, class Parameters>
__device__ __forceinline__ void round_bias_gradient(const Parameters& p) {
    if (p.d_bias_len_q == 0) round_sums<kThreads>(p.d_bias, p.d_bias_sum, p.d_bias_count);
    else round_units<kThreads>(p.d_bias, p.d_bias_sum, p.d_bias_len_q, p.d_bias_len_kv);
}
//% endif
