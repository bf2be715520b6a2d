// Documents as a link of the chain: a query sees the keys of its own document. Id: of their numbers, int or i64.

template <class Id>
struct DocumentIds : HidesNothing<DocumentIds<Id>> {
    static constexpr bool kScatters = true, kHasHeads = true;
    const Id *of_queries, *of_keys;   // of all entries of the batch
    i64 queries_step, keys_step;      // from one entry to the next
    int len_q, len_kv;
    const Id *query_documents, *key_documents;  // of one

    template <class Parameters>
    __device__ __forceinline__ static DocumentIds of(const Parameters& p, int len_q, int len_kv) {
        return {{},    p.document_ids_q, p.document_ids_kv, p.document_ids_q_batch, p.document_ids_kv_batch,
                len_q, len_kv,           nullptr,           nullptr};
    }
    __device__ __forceinline__ void load_heads(int batch, int, int) {
        query_documents = of_queries + batch * queries_step, key_documents = of_keys + batch * keys_step;
    }
    // Past the end, those of the last query and the last key.
    __device__ __forceinline__ Id of_query(int query) const { return query_documents[min(query, len_q - 1)]; }
    __device__ __forceinline__ Id of_key(int key) const { return key_documents[min(key, len_kv - 1)]; }

    __device__ __forceinline__ bool visible(int query, int key) const { return of_query(query) == of_key(key); }

    template <class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ void hide(float (&S)[kRowTiles][kTiles][4], const Position& position) const {
        constexpr bool kRowsAreKeys = Position::kRowsAreKeys;
        Id own[kRowTiles][2];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) own[i][h] = kRowsAreKeys ? of_key(position.row(i, h)) : of_query(position.row(i, h));
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            if (j % 4 == 0) barrier_warp_sync();  // else the compiler would load those of all columns at once, into too many registers
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = position.first_column + lane_index() % 4 * 2 + j * 8 + e;
                const Id document = kRowsAreKeys ? of_query(column) : of_key(column);
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        if (own[i][h] != document) S[i][j][h * 2 + e] = -infinity();
            }
        }
    }

    // By the lowest and the highest document of its queries and of its keys: that finds all that is seen where ids are in order.
    __device__ __forceinline__ SeenInTile seen_in(const TileBounds& tile) const {
        const ValueRange queries = range_over(tile.first_query, tile.end_query, [&](int query) -> i64 { return query_documents[query]; });
        const ValueRange keys = range_over(tile.first_key, tile.end_key, [&](int key) -> i64 { return key_documents[key]; });
        return is_equal(queries, keys);
    }
};
