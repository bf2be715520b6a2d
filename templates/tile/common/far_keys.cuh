// Keys too far from a query to count, where scores fall with the distance to it by themselves, as with ALiBi under a causal mask. Each
// query that sees keys sees its own, which has no distance, and by Cauchy and Schwarz no product of a query and a key exceeds |q| |k|. So
// before anything is multiplied it is known that P of a key is at most
//   exp2(scale_log2 * (|q| |k| - q . own key) - slope * distance)
// times P of the query's own key. The first keys of a work tile are left out if all of that together is at most kNegligible for each query,
// whatever their values are.

// Less than what the row sum, in fp32, rounds away; fp16 holds no P that is as small.
constexpr float kNegligible = 0x1p-26f;
constexpr float kAboveRounding = 1.0f + 0x1p-14f;  // times |q| |k|: more than what norms and products in fp32 err by
constexpr int kFarRows = 64;                       // queries, or keys, that share a bound
constexpr int kFarWarps = 8;                       // of a thread block

// Bounds of kFarRows queries: the largest |q|^2, as bits, and the lowest product with the own key, or of what their log-sum-exp is that of.
struct QueryBound {
    u32 norm;
    float own;
};

// A head of an entry of the batch, and what a warp has of its rows.
struct FarRows {
    int batch, head, part;

    __device__ __forceinline__ static FarRows of(int parts, u64 parts_reciprocal, int heads, u64 heads_reciprocal) {
        const int index = block_index() * kFarWarps + warp_index();
        const int of_batch = divide(index, parts_reciprocal), batch = divide(of_batch, heads_reciprocal);
        return {batch, of_batch - batch * heads, index - of_batch * parts};
    }
};

template <class Chain>
__device__ __forceinline__ float slope_log2(const Chain& chain, float scale_log2) {
    return chain.slope[0] * scale_log2;
}
// Whether so many keys are left out of a head that bounding it pays: not where the term of the farthest key is no more than this.
__device__ __forceinline__ bool may_leave_keys_out(float slope, int len_kv) {
    constexpr float kWorthwhile = 64.0f;
    return slope * static_cast<float>(len_kv) > kWorthwhile;
}

// The larger of non-negative numbers by their bits: a NaN is larger than all.
__device__ __forceinline__ void raise(u32& norm, float other) {
    const u32 bits = __float_as_uint(other);
    norm = bits > norm ? bits : norm;
}
// The largest of those in lanes kRowLanes apart.
__device__ __forceinline__ u32 largest_of_rows(u32 value) {
#pragma unroll
    for (int distance = kRowLanes; distance < 32; distance *= 2) {
        const u32 other = shfl_sync_bfly(value, distance);
        value = other > value ? other : value;
    }
    return value;
}

// |x|^2 of the row of this lane, in all lanes of the row, and a little more: squares of what is below 2^-63 may round to 0.
template <int kHeadDim, class Element>
__device__ __forceinline__ float norm_of_row(const Element* row) {
    RowPart<kHeadDim> part;
    part.load(row, row);
    return part.template product<Element>() + 0x1p-126f;
}

// A warp bounds kFarRows queries and as many keys. Rows of q and k are aligned to 16 bytes. kByLse: in place of the product with its own
// key a query has what that would be if P of the key were 1: no P is more than that, so that fewer keys count.
template <class Element, int kHeadDim, bool kByLse, class Parameters>
__device__ __forceinline__ void bound_rows(const Parameters& p, const FarRows& rows, float slope) {
    constexpr int kRowsOfPass = 32 / kRowLanes, kPasses = kFarRows / kRowsOfPass;
    const int row_of_pass = lane_index() / kRowLanes, first = rows.part * kFarRows;
    const int head_kv = divide(rows.head, p.group_reciprocal), own_key = p.len_kv - p.len_q;
    const Element* q = p.q + rows.batch * p.q_batch + rows.head * p.q_head;
    const Element* k = p.k + rows.batch * p.k_batch + head_kv * p.k_head;
    const bool counts = may_leave_keys_out(slope, p.len_kv);
    // Of heads that share keys the first one bounds them, for those whose slopes are steeper, too.
    const bool is_first = rows.head == 0 || divide(rows.head - 1, p.group_reciprocal) != head_kv;
    u32 key_norm = 0;
    constexpr float kLog2E = 1.44269504f;
    const i64 head = static_cast<i64>(rows.batch) * p.heads_q + rows.head;
    const float* of_head_lse = nullptr;
    if constexpr (kByLse) of_head_lse = p.lse + head * p.len_q;
    if (counts && first < p.len_q) {
        QueryBound bound{0, infinity()};
#pragma unroll 4
        for (int pass = 0; pass < kPasses; ++pass) {
            const int query = first + pass * kRowsOfPass + row_of_pass, key = query + own_key;
            const Element* query_row = q + static_cast<i64>(min(query, p.len_q - 1)) * p.q_row;
            const Element* key_row = k + static_cast<i64>(max(0, min(key, p.len_kv - 1))) * p.k_row;
            float own;
            if constexpr (kByLse) {
                own = of_head_lse[min(query, p.len_q - 1)] * (kLog2E / p.scale_log2);
                own = own == own ? own : -infinity();  // of a NaN all keys count
            } else {
                RowPart<kHeadDim> both;
                both.load(query_row, key_row);
                own = both.template product<Element>();
            }
            const float norm = norm_of_row<kHeadDim>(query_row);
            if (own_key == 0) raise(key_norm, norm_of_row<kHeadDim>(key_row));  // these are the keys that the warp would read next
            if (query >= p.len_q || key < 0) continue;
            raise(bound.norm, norm);
            bound.own = fminf(bound.own, own);
        }
        bound.norm = largest_of_rows(bound.norm);
#pragma unroll
        for (int distance = kRowLanes; distance < 32; distance *= 2) bound.own = fminf(bound.own, shfl_sync_bfly(bound.own, distance));
        if (lane_index() == 0) reinterpret_cast<QueryBound*>(p.query_bounds)[head * p.query_bounds_of_head + rows.part] = bound;
    }
    if (!is_first || first >= p.len_kv || !(counts || p.group_reciprocal != 0)) return;
    if (!counts || own_key != 0) {
#pragma unroll 4
        for (int pass = 0; pass < kPasses; ++pass) {
            const int key = min(first + pass * kRowsOfPass + row_of_pass, p.len_kv - 1);
            raise(key_norm, norm_of_row<kHeadDim>(k + static_cast<i64>(key) * p.k_row));
        }
    }
    key_norm = largest_of_rows(key_norm);
    const i64 index = (static_cast<i64>(rows.batch) * p.heads_kv + head_kv) * p.key_bounds_of_head + rows.part;
    if (lane_index() == 0) p.key_bounds[index] = key_norm;
}

// The first key that counts for a work tile of kQueries queries: a multiple of kFarRows. All lanes of a warp call it together.
template <int kQueries, class Parameters>
__device__ __forceinline__ int first_key_that_counts(const Parameters& p, const FarRows& rows, float slope) {
    static_assert(kQueries % kFarRows == 0, "bounds are of whole parts of a work tile");
    if (!may_leave_keys_out(slope, p.len_kv)) return 0;
    const i64 head = static_cast<i64>(rows.batch) * p.heads_q + rows.head;
    const QueryBound* of_queries = reinterpret_cast<const QueryBound*>(p.query_bounds) + head * p.query_bounds_of_head;
    const i64 head_kv = static_cast<i64>(rows.batch) * p.heads_kv + divide(rows.head, p.group_reciprocal);
    const u32* of_keys = p.key_bounds + head_kv * p.key_bounds_of_head;
    QueryBound bound{0, infinity()};
#pragma unroll
    for (int i = 0; i < kQueries / kFarRows; ++i) {
        const int part = rows.part * (kQueries / kFarRows) + i;
        if (part >= p.query_bounds_of_head) break;
        const QueryBound own = of_queries[part];
        bound.norm = own.norm > bound.norm ? own.norm : bound.norm;
        bound.own = fminf(bound.own, own.own);
    }
    // From the first key on, until what is left out counts, or keys are no longer all before the tile's first query.
    const int own_key = rows.part * kQueries + p.len_kv - p.len_q;
    const float norm = sqrtf(__uint_as_float(bound.norm)) * kAboveRounding;
    float before = 0.0f;
    for (int first = 0;; first += 32) {
        const int part = first + lane_index(), distance = own_key - (part + 1) * kFarRows + 1;
        float share = infinity();
        if (distance > 0) {
            const float product = norm * sqrtf(__uint_as_float(of_keys[part]));
            const float term = slope * static_cast<float>(distance);
            share = static_cast<float>(kFarRows) * ex2_approx_ftz((product - bound.own) * p.scale_log2 - term);
        }
        float of_lanes = share;  // at first of the lane, then of 2, 4 .. lanes; `share`: of this lane and those before it
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float neighbours = shfl_sync_bfly(of_lanes, step);
            if (lane_index() & step) share += neighbours;
            of_lanes += neighbours;
        }
        const u32 counting = vote_sync_ballot(!(before + share <= kNegligible));
        if (counting != 0) return (first + trailing_zeros(counting)) * kFarRows;
        before += of_lanes;
    }
}

// The last query for which some of the kKeys keys of a key tile count, of all query heads that share them; -1: none. By a warp, together.
template <int kKeys, class Parameters>
__device__ __forceinline__ int last_query_that_counts(const Parameters& p, const FarRows& rows) {
    const int parts = p.query_bounds_of_head, end_key = (rows.part + 1) * kKeys, group = p.heads_q / p.heads_kv;
    const int* first_keys = p.first_keys + (static_cast<i64>(rows.batch) * p.heads_q + rows.head * group) * parts;
    int last = -1;  // part
    for (int member = 0; member < group; ++member, first_keys += parts)
        for (int first = (parts - 1) / 32 * 32; first + 31 > last && first >= 0; first -= 32) {
            const int part = first + lane_index();
            const u32 counting = vote_sync_ballot(part < parts && first_keys[part] < end_key);
            if (counting == 0) continue;
            last = max(last, first + 31 - leading_zeros(counting));
            break;
        }
    return last * kFarRows + kFarRows - 1;
}
