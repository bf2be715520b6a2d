// The two kernels beside the main one of the generic backward pass, which have a block for each query tile of each head: one before it
// writes what it needs of each query and zeroes the sums of dQ, one after it scales and rounds these.

//% if not packed
struct QueryTileWork {
    int batch, head, first_query;
    i64 index;  // among the query tiles of all heads

    template <int kBlockQ, class Parameters>
    __device__ __forceinline__ static QueryTileWork find(const Parameters& p, const DenseSequences& sequences) {
        const int heads_before = divide(block_index(), p.query_tiles_reciprocal), batch = divide(heads_before, p.heads_q_reciprocal);
        const int head = heads_before - batch * p.heads_q, tile = block_index() - heads_before * p.query_tiles;
        return {batch, head, tile * kBlockQ, sequences.first_tile(batch, head) + tile};
    }
};

//% endif
// row_lse, row_delta, row_shift; d_q_sum = 0. clear(tile) zeroes what else the main kernel counts up of a query tile.
//% if packed
// make_chain(len_q, len_kv): the chain of a sequence.
template <class Element, int kThreads, int kBlockQ, int kHeadDim, int kHeadDimV, int kColumns, class Parameters, class MakeChain,
          class Clear>
__device__ __forceinline__ void preprocess(const Parameters& p, const MakeChain& make_chain, const Clear& clear) {
//% else
template <class Element, int kThreads, int kBlockQ, int kHeadDim, int kHeadDimV, int kColumns, class Parameters, class Chain, class Clear>
__device__ __forceinline__ void preprocess(const Parameters& p, const Chain& chain, const Clear& clear) {
//% endif
//% if packed
    if (!ListedQueryTile<kBlockQ>::exists(p)) return;
    const auto [sequences, batch, head, first_query, tile] = ListedQueryTile<kBlockQ>::find(p);
    const auto chain = make_chain(sequences.len_q(batch), sequences.len_kv(batch));
//% else
    const DenseSequences sequences{p.len_q, p.len_kv, p.heads_q, p.query_tiles};
    const auto [batch, head, first_query, tile] = QueryTileWork::find<kBlockQ>(p, sequences);
//% endif
    const int len_kv = sequences.len_kv(batch), queries = sequences.len_q(batch) - first_query;
    const Strides of_out{p.out_batch, p.out_head, p.out_row}, of_d_out{p.d_out_batch, p.d_out_head, p.d_out_row};
    const Element* out = sequences.query_row(p.out, of_out, batch, head, first_query);
    const Element* d_out = sequences.query_row(p.d_out, of_d_out, batch, head, first_query);
    const i64 row = sequences.lse_offset(batch, head) + first_query;
    const float *lse = p.lse + row, *d_lse = p.d_lse == nullptr ? nullptr : p.d_lse + row;
    float *row_lse = p.row_lse + tile * kBlockQ, *row_delta = p.row_delta + tile * kBlockQ, *row_shift = p.row_shift + tile * kBlockQ;
    write_zeros<kThreads, kBlockQ * kColumns>(p.d_q_sum + tile * (kBlockQ * kColumns));
    clear(tile);
    write_row_statistics<kThreads, kBlockQ, kHeadDimV>(row_lse, row_delta, out, p.out_row, d_out, p.d_out_row, lse, d_lse, queries);

    const bool huge = any_huge_row<kBlockQ>(lse, queries);
    if (thread_index() == 0) p.huge_tiles[tile] = huge;
    if (!unlikely(huge || len_kv <= kFewKeys)) return;
    barrier_sync();  // row_lse and row_delta are written: those of some rows are replaced
    write_exact_rows<kThreads, kBlockQ, kHeadDim, kHeadDimV>(row_lse, row_delta, row_shift, p, sequences, batch, head, first_query, huge,
                                                             chain);
}

// dQ = scale * d_q_sum. A warp has 16 rows of the block's query tile.
template <class Element, int kThreads, int kBlockQ, int kHeadDim, int kColumns, bool kVectorReductions, class Parameters>
__device__ __forceinline__ void postprocess(const Parameters& p) {
    using SumTile = SharedTile<16, kColumns>;  // of a warp
//% if packed
    if (!ListedQueryTile<kBlockQ>::exists(p)) return;
    const auto [sequences, batch, head, first_query, tile] = ListedQueryTile<kBlockQ>::find(p);
//% else
    const DenseSequences sequences{p.len_q, p.len_kv, p.heads_q, p.query_tiles};
    const auto [batch, head, first_query, tile] = QueryTileWork::find<kBlockQ>(p, sequences);
//% endif
    const int warp = warp_index(), first_row = first_query + warp * 16;
    const float* sums = p.d_q_sum + tile * (kBlockQ * kColumns);
    SharedRegions regions;
    const SharedAddress tiles = regions.take(kThreads / 32 * SumTile::kBytes);

    float dQ[1][kColumns / 8][4];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) load_gradient<kVectorReductions>(dQ[0][j], sums + gradient_offset<kColumns>(warp, j), p.scale);
    const Strides of_d_q{p.d_q_batch, p.d_q_head, p.d_q_row};
    Element* rows = sequences.query_row(p.d_q, of_d_q, batch, head, first_row);
    store_output<kHeadDim>(rows, p.d_q_row, sequences.len_q(batch) - first_row, dQ, SumTile{tiles + warp * SumTile::kBytes});
}
