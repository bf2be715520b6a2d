// Gradients of modifiers' tensors from their fp32 sums.

__device__ __forceinline__ void store_rounded(float* to, float value) { *to = value; }
template <class Element>
__device__ __forceinline__ void store_rounded(Element* to, float value) {
    to->bits = static_cast<u16>(cvt_rn_x2<Element>(value, 0.0f));
}

// Each block has kThreads * 8 numbers. Of nobody's gradient `to` is null.
template <int kThreads, class Element>
__device__ __forceinline__ void round_sums(Element* to, const float* sums, i64 count) {
    const i64 first = static_cast<i64>(block_index()) * (kThreads * 8) + thread_index();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const i64 n = first + i * kThreads;
        if (to != nullptr && n < count) store_rounded(to + n, sums[n]);
    }
}

// Two neighbours, if they are there.
__device__ __forceinline__ void store_pair(float* to, float first, float second, bool both) {
    to[0] = first;
    if (both) to[1] = second;
}
template <class Element>
__device__ __forceinline__ void store_pair(Element* to, float first, float second, bool both) {
    const u32 pair = cvt_rn_x2<Element>(first, second);
    if (both && reinterpret_cast<u64>(to) % 4 == 0) {
        *reinterpret_cast<u32*>(to) = pair;
    } else {
        to[0].bits = static_cast<u16>(pair);
        if (both) to[1].bits = static_cast<u16>(pair >> 16);
    }
}

// Of sums that lie in units (ScoreSums): a block has those of some queries of a head and of all keys, a warp a unit at a time. Lanes of
// neighbouring keys exchange numbers, so that each has two keys of one query.
template <int kThreads, class Element>
__device__ __forceinline__ void round_units(Element* to, const float* sums, int len_q, int len_kv) {
    constexpr int kKeys = ScoreSums::kUnitKeys, kQueries = ScoreSums::kUnitQueries;
    const int units = (len_kv + kKeys - 1) / kKeys, query_units = (len_q + kQueries - 1) / kQueries;
    const int head = block_index() / query_units, query_unit = block_index() - head * query_units, lane = lane_index();
    const bool odd = lane / 4 % 2 != 0;
    const int query = query_unit * kQueries + lane % 4 * 2 + odd;
    const i64 first_unit = (static_cast<i64>(head) * query_units + query_unit) * units;
    Element* row = to + (static_cast<i64>(head) * len_q + query) * len_kv;
#pragma unroll 4
    for (int unit = warp_index(); unit < units; unit += kThreads / 32) {
        const uint4 four = reinterpret_cast<const uint4*>(sums + (first_unit + unit) * ScoreSums::kUnit)[lane];
        const u32 own[2][2] = {{four.x, four.y}, {four.z, four.w}};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 got = shfl_sync_bfly(odd ? own[h][0] : own[h][1], 4);  // of the query that this lane keeps
            const int key = unit * kKeys + h * 8 + lane / 4 - odd;
            const float first = __uint_as_float(odd ? got : own[h][0]), second = __uint_as_float(odd ? own[h][1] : got);
            if (to != nullptr && query < len_q && key < len_kv) store_pair(row + key, first, second, key + 1 < len_kv);
        }
    }
}
