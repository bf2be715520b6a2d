// Packed sequences in a backward pass: where what it has of each query tile lies, and the lists that its kernel `_sequences` makes, of key
// tiles for the main kernel and of query tiles for those beside it.

// One of packed sequences, for which this has the functions of DenseSequences. What a query tile has in memory lies in
// [heads_q, query_tiles], of a sequence from the tile on that its first row would be in, plus one for each sequence before: so no tile is
// of two of them.
template <int kBlockQ>
struct PackedGradientRows : PackedSequences {
    int query_tiles;  // of a head, as far as there may be so many

    __device__ __forceinline__ i64 first_tile(int batch, int head) const {
        return static_cast<i64>(head) * query_tiles + rows.first_q / kBlockQ + batch;
    }
};

// The query tile of a block, in kernels that have one for each tile of each head.
template <int kBlockQ>
struct ListedQueryTile {
    PackedGradientRows<kBlockQ> sequences;
    int batch, head, first_query;
    i64 index;  // among those of all heads

    // There may be fewer tiles than blocks.
    template <class Parameters>
    __device__ __forceinline__ static bool exists(const Parameters& p) {
        return block_index() < WorkList::at(p.query_list).tiles * p.heads_q;
    }
    template <class Parameters>
    __device__ __forceinline__ static ListedQueryTile find(const Parameters& p) {
        const int tile = divide(block_index(), p.heads_q_reciprocal);
        return at(p, tile, block_index() - tile * p.heads_q);
    }
    template <class Parameters>
    __device__ __forceinline__ static ListedQueryTile at(const Parameters& p, int tile, int head) {
        const PackedTile listed = WorkList::at(p.query_list).tile(tile);
        const PackedGradientRows<kBlockQ> sequences{{listed.rows, p.tokens_q}, p.query_tiles};
        return {sequences, listed.batch, head, listed.first_row, sequences.first_tile(listed.batch, head) + listed.first_row / kBlockQ};
    }
};

// Tiles of kRows keys in a list. kFirstLast: the first ones of a sequence are listed last, so that they are handed out first.
template <int kRows, bool kFirstLast>
struct KeyTiles {
    __device__ __forceinline__ static int work(const SequenceRows& rows) { return rows.len_q; }
    __device__ __forceinline__ static int count(const SequenceRows& rows) { return (rows.len_kv + kRows - 1) / kRows; }
    __device__ __forceinline__ static int first_row(int index, int tiles) { return (kFirstLast ? tiles - 1 - index : index) * kRows; }
};

// Tiles of kRows queries, of sequences in the order of `KeyTiles`: so sums of dQ are complete in that order.
template <int kRows>
struct SummedTiles : QueryTiles<kRows> {
    __device__ __forceinline__ static int work(const SequenceRows& rows) { return rows.len_q; }
};

template <int kBlockQ, int kBlockKv, bool kLastFirst, int kThreads, class Parameters>
__device__ __forceinline__ void list_gradient_tiles(const Parameters& p, const SequencesStorage<kThreads>& smem) {
    list_tiles<KeyTiles<kBlockKv, !kLastFirst>>(p, p.work_list, p.l2_group_heads, smem);
    barrier_sync();  // nobody reads shared memory any more
    list_tiles<SummedTiles<kBlockQ>>(p, p.query_list, p.l2_group_queries, smem);
}

// Gradients are 0 in rows of no sequence.
template <int kHeadDim, int kHeadDimV, int kThreads, class Parameters>
__device__ __forceinline__ void clear_unused_gradients(const Parameters& p, const SequencesStorage<kThreads>& smem, int number, int warps) {
    for_unused_rows({p.cu_seqlens_q, p.seqused_q, p.batch, p.tokens_q}, smem, number, warps,
                    [&](int row) { clear_row<kHeadDim>(p.d_q, p.d_q_row, p.d_q_head, p.heads_q, row); });
    for_unused_rows({p.cu_seqlens_kv, p.seqused_kv, p.batch, p.tokens_kv}, smem, number, warps, [&](int row) {
        clear_row<kHeadDim>(p.d_k, p.d_k_row, p.d_k_head, p.heads_kv, row);
        clear_row<kHeadDimV>(p.d_v, p.d_v_row, p.d_v_head, p.heads_kv, row);
    });
}
