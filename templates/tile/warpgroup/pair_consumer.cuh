// A consumer of the backward kernel for pairs of blocks: one of two warpgroups of a block, each with a quarter of the columns of dQ.

// A warpgroup, with all keys of the block. The first one computes P^T, the second one dS^T. Of the products that follow each has its
// columns.
template <class Traits, class Parameters, int kWarpgroup>
struct PairConsumer {
    using Element = typename Traits::Element;
    using Stages = typename Traits::Stages;
    using DQ = typename Traits::DQ;
    static constexpr int kColumns = Traits::kColumns, kColumnsV = Traits::kColumnsV, kBlockQ = Traits::kBlockQ, kStages = Traits::kStages;
    using KeyTile = typename Traits::KeyTile;
    static constexpr int kConsumerThreads = 2 * 128;
    static constexpr int kPReady = 1, kPFree = 2;  // named barriers of the consumers
    static constexpr int kDScoresReady = 3;        // named barrier of the consumers and the warp that sends dS
    using Exchange = decltype(static_cast<const Stages*>(nullptr)->exchange());
    using Share = ColumnShare<kColumns, kWarpgroup>;
    using ShareV = ColumnShare<kColumnsV, kWarpgroup>;

    const Parameters& p;
    const Stages& stages;
    const KeyWork& work;
    const Exchange exchange;
    const int warp, lane, panel;  // warp: of this warpgroup; panel: of dQ, of four, two for each block
    HeadWalk next;
    PipelineState<kStages> state;
    u32 parity = 0;  // of the exchange that is next
    i64 pending = -1;  // the tile that dQ is of, which is still to be added, and the stage it was in
    PipelineState<kStages> pending_state;
    float S[1][kBlockQ / 8][4];  // S^T or dP^T
    float dQ[8][4];
    u32 P[kBlockQ / 16][4];  // of the first warpgroup
    float dK[Share::kColumns / 8][4] = {}, dV[ShareV::kColumns / 8][4] = {};

    __device__ __forceinline__ PairConsumer(const Parameters& p, const Stages& stages, const KeyWork& work)
        : p(p), stages(stages), work(work), exchange(stages.exchange()), warp(warp_index() % 4), lane(lane_index()),
          panel(cluster_ctarank() * 2 + kWarpgroup), next(work, p) {}

    // By each warp: its lanes may have read row_lse or row_delta.
    __device__ __forceinline__ void release(const Pipeline<kStages>& pipeline, u32 stage) const {
        barrier_warp_sync();
        pipeline.consumer_release(stage, lane == 0);
    }
    // S^T or dP^T of the tile that is next.
    __device__ __forceinline__ void issue_next_scores() {
        issue_scores<Element, kWarpgroup, kColumns, kColumnsV>(S[0], stages, state);
    }
    __device__ __forceinline__ void compute_p() {
        round_probabilities<Element, kBlockQ>(P, S, p, stages, state.stage, work.tiles, next, work.first_key + warp * 16,
                                              Traits::make_chain(p.len_q, p.len_kv));
    }
    __device__ __forceinline__ void store_p() {
        store_transposed(stages.p_tile(), warp * 16, P);
        fence_proxy_async();
    }
    // The consumers and the warp that sends dS meet once all of it is written.
    __device__ __forceinline__ static void wait_d_scores() { barrier_sync_unaligned(kDScoresReady, kConsumerThreads + 32); }
    // Adds dQ to the sum in memory. This takes as long as a product does: it is done behind products of the next tile.
    __device__ __forceinline__ void add_d_q() {
        if (pending < 0) return;
        if constexpr (Traits::kDeterministic) stages.keeper.wait_turn(pending_state);
        DQ::add(p.d_q_sum + pending * DQ::kFloats, panel, warp, dQ);
    }
    // dS^T and dV of the tile that is next, whose P^T and dP^T are there. kFirst: there is no tile before it.
    template <bool kFirst>
    __device__ __forceinline__ void differentiate_scores() {
        (kWarpgroup == 0 ? stages.d_out_pipeline : stages.query_pipeline).consumer_wait(state);
        barrier_sync_unaligned(kPReady, kConsumerThreads);
        launder(dV);
        wgmma_fence();
        const auto d_out = stages.operand(stages.d_out_tile(state.stage));
        gemm_over_queries<Element>(dV, stages.operand(stages.p_tile()), columns_from<ShareV::kFirst>(d_out));
        wgmma_commit_group();
        if constexpr (kWarpgroup == 1) {
            if constexpr (!kFirst) exchange.wait_arrived(parity ^ 1);
            store_score_gradients<Element>(stages.d_s_tile(), S[0], stages.p_tile(), stages.delta(state.stage), warp);
        }
        if constexpr (Traits::kDeterministic) add_d_q();  // before dO goes back, which tells the keeper
        wgmma_wait_group<0>();
        launder(dV);
        release(stages.d_out_pipeline, state.stage);
        wait_d_scores();
    }
    // dQ and dK of a tile, and S^T or dP^T of the one after it. kLast: there is none.
    template <bool kLast>
    __device__ __forceinline__ void step() {
        const PipelineState<kStages> own = state;
        const i64 index = next.index;
        state.advance();
        next.advance(work, p);
        if constexpr (!kLast) issue_next_scores();
        launder(dK);
        wgmma_fence();
        const auto queries = stages.operand(stages.query_tile(own.stage));
        gemm_over_queries<Element>(dK, stages.operand(stages.d_s_tile()), columns_from<Share::kFirst>(queries));
        wgmma_commit_group();
        if constexpr (!Traits::kDeterministic) add_d_q();
        wgmma_wait_group<1>();
        if constexpr (!kLast) {
            launder(S[0]);
            if constexpr (kWarpgroup == 0) compute_p();  // while the product of dK is under way
        }
        exchange.take(parity, kWarpgroup == 1 && thread_index() == (kWarpgroup + 1) * 128);
        parity ^= 1;
        wgmma_fence();
        const KeyTile keys{stages.keys + panel * KeyTile::kPanelBytes};
        gemm_over_keys<Element>(dQ, stages.operand(stages.d_s_tile()), stages.operand(keys));
        gemm_over_keys<Element, true>(dQ, stages.operand(exchange.tile()), stages.operand(exchange.keys(kWarpgroup)));
        wgmma_commit_group();
        wgmma_wait_group<0>();
        launder(dK);
        launder(dQ);
        pending = index, pending_state = own;
        if constexpr (kLast) add_d_q();
        release(stages.query_pipeline, own.stage);
        if constexpr (!kLast) {
            if constexpr (kWarpgroup == 0) {
                bar_sync(kPFree, kConsumerThreads);
                store_p();
            } else {
                bar_arrive(kPFree, kConsumerThreads);
            }
            differentiate_scores<false>();
        }
    }
    __device__ __forceinline__ void run() {
        if (next.left > 0) {
            issue_next_scores();
            wgmma_wait_group<0>();
            launder(S[0]);
            if constexpr (kWarpgroup == 0) {
                compute_p();
                store_p();
            }
            differentiate_scores<true>();
#pragma unroll 1
            while (next.left > 1) step<false>();
            step<true>();
        }
        barrier_sync_unaligned(kPReady, kConsumerThreads);  // nobody reads K and V any more
        const int row = warp * 16, key = work.first_key + row;
        store_columns<Element, ShareV::kFirst>(p.d_v_map, dV, 1.0f, stages.value_tile(), row, key, work.head_kv, work.batch);
        store_columns<Element, Share::kFirst>(p.d_k_map, dK, p.scale, stages.key_tile(), row, key, work.head_kv, work.batch);
        if (lane == 0) cp_async_bulk_wait_group_read<0>();
    }
};
