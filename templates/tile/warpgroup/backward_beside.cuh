// The kernels beside the main one of a backward pass, which have a block for each query tile of each head: preprocess, before it, writes
// what it needs of each query and zeroes the sums of dQ; postprocess, after it, rounds these, unless the main kernel does
// (background_rounding.cuh).

//% if not packed
struct HeadTile {
    int tile, head, batch;

    template <class Parameters>
    __device__ __forceinline__ static HeadTile of_block(const Parameters& p) {
        const int head_and_batch = divide(block_index(), p.query_tiles_reciprocal);
        const int batch = divide(head_and_batch, p.heads_q_reciprocal);
        return {block_index() - head_and_batch * p.query_tiles, head_and_batch - batch * p.heads_q, batch};
    }
};

//% endif
// row_lse of a query tile in memory: one for each row, and a flag that says whether some row is huge, so that row_shift is there, too.
template <int kBlockQ>
struct RowLse {
    static constexpr int kRows = kBlockQ, kFlag = kRows, kFloats = kRows + 4, kBytes = kFloats * 4;  // of whole 16 bytes
};

// `kSums`: fp32 numbers of a tile's dQ.
//% if packed
// make_chain(len_q, len_kv): the chain of a sequence. Which tile's sums a block zeroes does not matter: so it need not wait for the list.
template <int kThreads, int kBlockQ, int kHeadDim, int kHeadDimV, int kSums, class MakeChain, class Parameters>
__device__ __forceinline__ void preprocess(const Parameters& p, const MakeChain& make_chain) {
    write_zeros<kThreads, kSums>(p.d_q_sum + static_cast<i64>(block_index()) * kSums);
    griddepcontrol_wait();
    if (!ListedQueryTile<kBlockQ>::exists(p)) return;
    const auto [sequences, batch, head, first_query, index] = ListedQueryTile<kBlockQ>::find(p);
    const int queries = sequences.len_q(batch) - first_query;
    const i64 row = sequences.lse_offset(batch, head) + first_query;
    const auto chain = make_chain(sequences.len_q(batch), sequences.len_kv(batch));
//% else
template <int kThreads, int kBlockQ, int kHeadDim, int kHeadDimV, int kSums, class Chain, class Parameters>
__device__ __forceinline__ void preprocess(const Parameters& p, const Chain& chain) {
    const HeadTile work = HeadTile::of_block(p);
    const DenseSequences sequences{p.len_q, p.len_kv, p.heads_q, p.query_tiles};
    const int batch = work.batch, head = work.head, first_query = work.tile * kBlockQ, queries = sequences.len_q(batch) - first_query;
    const i64 index = sequences.first_tile(batch, head) + work.tile, row = sequences.lse_offset(batch, head) + first_query;
//% endif
    const Strides of_out{p.out_batch, p.out_head, p.out_row}, of_d_out{p.d_out_batch, p.d_out_head, p.d_out_row};
    float* row_lse = p.row_lse + index * RowLse<kBlockQ>::kFloats;
//% if zeroes
    if (index < p.zeroed_tiles) write_zeros<kThreads, kSums>(p.d_q_sum + index * kSums);  // see sum_zeros.cuh
//% elif not packed
    write_zeros<kThreads, kSums>(p.d_q_sum + index * kSums);
//% endif
    write_row_statistics<kThreads, kBlockQ, kHeadDimV>(
        row_lse, p.row_delta + index * kBlockQ, sequences.query_row(p.out, of_out, batch, head, first_query), p.out_row,
        sequences.query_row(p.d_out, of_d_out, batch, head, first_query), p.d_out_row, p.lse + row,
        p.d_lse == nullptr ? nullptr : p.d_lse + row, queries);

    const bool huge = any_huge_row<kBlockQ>(p.lse + row, queries);
    if (thread_index() < 4) row_lse[RowLse<kBlockQ>::kFlag + thread_index()] = huge ? 1.0f : 0.0f;
    if (!unlikely(huge || sequences.len_kv(batch) <= kFewKeys)) return;
    barrier_sync();  // row_lse and row_delta are written: those of some rows are replaced
    write_exact_rows<kThreads, kBlockQ, kHeadDim, kHeadDimV>(row_lse, p.row_delta + index * kBlockQ, p.row_shift + index * kBlockQ, p,
                                                             sequences, batch, head, first_query, huge, chain);
}

// `Gradient` is what a warp of the main kernel held of dQ; `QueryTile` a tile of as many queries in shared memory.
template <int kBlockQ, class Gradient, class QueryTile, class Parameters>
__device__ __forceinline__ void postprocess(const Parameters& p) {
    SharedRegions regions;
    const QueryTile rows{regions.take(QueryTile::kBytes)};
//% if packed
    if (!ListedQueryTile<kBlockQ>::exists(p)) return;
    const ListedQueryTile<kBlockQ> work = ListedQueryTile<kBlockQ>::find(p);
    const SequenceRows& sequence = work.sequences.rows;
    Gradient gradient;
    gradient.load(p.d_q_sum + work.index * Gradient::kFloats, warp_index());
//% else
    const HeadTile work = HeadTile::of_block(p);
    const DenseSequences sequences{p.len_q, p.len_kv, p.heads_q, p.query_tiles};
    Gradient gradient;
    gradient.load(p.d_q_sum + (sequences.first_tile(work.batch, work.head) + work.tile) * Gradient::kFloats, warp_index());
//% endif
    gradient.store(rows, warp_index(), p.scale);
    fence_proxy_async();
    barrier_sync();
    if (thread_index() > 0) return;
#pragma unroll
    for (int panel = 0; panel < QueryTile::kPanels; ++panel) {
        const SharedAddress base = rows.base + panel * QueryTile::kPanelBytes;
//% if packed
        const int row = sequence.query_coordinate(work.first_query);
        cp_async_bulk_tensor_store_5d(p.d_q_map, base, panel * 64, row, work.head, sequence.end_q(), kMapRows);
//% else
        cp_async_bulk_tensor_store(p.d_q_map, base, panel * 64, work.tile * kBlockQ, work.head, work.batch);
//% endif
    }
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();
}
