// A consumer of the backward kernel for wide heads: one of two warpgroups that divide the columns of dV, dK and dQ.

// A warpgroup, with all keys of the block. The first one computes P^T, the second one dS^T. Of the products that follow each has its
// columns.
template <class Traits, class Parameters, int kWarpgroup>
struct WideConsumer {
    using Element = typename Traits::Element;
    using Stages = typename Traits::Stages;
    using DQ = typename Traits::DQ;
    static constexpr int kColumns = Traits::kColumns, kColumnsV = Traits::kColumnsV, kBlockQ = Traits::kBlockQ, kStages = Traits::kStages;
    static constexpr int kConsumerThreads = 2 * 128;
    static constexpr int kPReady = 1, kDScoresReady = 2;  // named barriers of the consumers
    using Share = ColumnShare<kColumns, kWarpgroup>;
    using ShareV = ColumnShare<kColumnsV, kWarpgroup>;
    static constexpr int kFirstPart = Share::kColumns < 64 ? Share::kColumns : 64, kSecondPart = Share::kColumns - kFirstPart;

    const Parameters& p;
    const Stages& stages;
    const KeyWork& work;
    const int warp, lane;  // warp: of this warpgroup
    HeadWalk next;
    PipelineState<kStages> state;
    float S[1][kBlockQ / 8][4];  // S^T or dP^T
    float dK[Share::kColumns / 8][4] = {}, dV[ShareV::kColumns / 8][4] = {};

    __device__ __forceinline__ WideConsumer(const Parameters& p, const Stages& stages, const KeyWork& work)
        : p(p), stages(stages), work(work), warp(warp_index() % 4), lane(lane_index()), next(work, p) {}

    // By each warp: its lanes may have read row_lse or row_delta.
    __device__ __forceinline__ void release(const Pipeline<kStages>& pipeline, u32 stage) const {
        barrier_warp_sync();
        pipeline.consumer_release(stage, lane == 0);
    }
    // S^T or dP^T of the tile that is next.
    __device__ __forceinline__ void issue_next_scores() {
        issue_scores<Element, kWarpgroup, kColumns, kColumnsV>(S[0], stages, state);
    }
    __device__ __forceinline__ void store_p() {
        u32 P[kBlockQ / 16][4];
        round_probabilities<Element, kBlockQ>(P, S, p, stages, state.stage, work.tiles, next, work.first_key + warp * 16,
//% if heads and opens
                                              of_head(of_batch(Traits::make_chain(p, p.len_q, p.len_kv), work.batch), work.batch,
                                                      next.head(work, p)));
//% elif heads
                                              of_head(Traits::make_chain(p, p.len_q, p.len_kv), work.batch, next.head(work, p)));
//% elif opens
                                              of_batch(Traits::make_chain(p, p.len_q, p.len_kv), work.batch));
//% elif links
                                              Traits::make_chain(p, p.len_q, p.len_kv));
//% else
                                              Traits::make_chain(p.len_q, p.len_kv));
//% endif
        store_transposed(stages.p_tile(), warp * 16, P);
        fence_proxy_async();
    }
    template <int kTiles>
    __device__ __forceinline__ void issue_d_q(float (&dQ)[kTiles][4], int part) const {
        auto keys = columns_from<Share::kFirst>(stages.key_tile());
        keys.base += part * decltype(keys)::kPanelBytes;
        gemm_over_keys<Element>(dQ, stages.d_s_tile(), keys);
        wgmma_commit_group();
    }

    // dS^T and dV of the tile that is next, whose P^T and dP^T are there.
    __device__ __forceinline__ void differentiate_scores() {
        (kWarpgroup == 0 ? stages.d_out_pipeline : stages.query_pipeline).consumer_wait(state);
        barrier_sync_unaligned(kPReady, kConsumerThreads);
        launder(dV);
        wgmma_fence();
        gemm_over_queries<Element>(dV, stages.p_tile(), columns_from<ShareV::kFirst>(stages.d_out_tile(state.stage)));
        wgmma_commit_group();
        if constexpr (kWarpgroup == 1)
            store_score_gradients<Element>(stages.d_s_tile(), S[0], stages.p_tile(), stages.delta(state.stage), warp);
        wgmma_wait_group<0>();
        launder(dV);
        release(stages.d_out_pipeline, state.stage);
        barrier_sync_unaligned(kDScoresReady, kConsumerThreads);
    }
    // dQ and dK of a tile, and S^T or dP^T of the one after it. kLast: there is none.
    template <bool kLast>
    __device__ __forceinline__ void step() {
        const u32 stage = state.stage;
        float* d_q_sum = p.d_q_sum + next.index * DQ::kFloats;
        float first[kFirstPart / 8][4], second[kSecondPart > 0 ? kSecondPart / 8 : 1][4];
        wgmma_fence();
        issue_d_q(first, 0);
        if constexpr (kSecondPart > 0) issue_d_q(second, 1);
        wgmma_wait_group<(kSecondPart > 0)>();
        launder(first);
        if constexpr (Traits::kDeterministic) stages.keeper.wait_turn(state);
        DQ::add(d_q_sum, Share::kFirst / 64, warp, first);
        state.advance();
        next.advance(work, p);
        if constexpr (!kLast) issue_next_scores();
        launder(dK);
        wgmma_fence();
        gemm_over_queries<Element>(dK, stages.d_s_tile(), columns_from<Share::kFirst>(stages.query_tile(stage)));
        wgmma_commit_group();
        if constexpr (kSecondPart > 0) {
            wgmma_wait_group<!kLast + 1>();
            launder(second);
            DQ::add(d_q_sum, Share::kFirst / 64 + 1, warp, second);
        }
        if constexpr (!kLast) {
            wgmma_wait_group<1>();
            launder(S[0]);
            if constexpr (kWarpgroup == 0) store_p();  // while the product of dK is under way
        }
        wgmma_wait_group<0>();
        launder(dK);
        release(stages.query_pipeline, stage);
        if constexpr (!kLast) differentiate_scores();
    }
    __device__ __forceinline__ void run() {
        if (next.left > 0) {
            issue_next_scores();
            wgmma_wait_group<0>();
            launder(S[0]);
            if constexpr (kWarpgroup == 0) store_p();
            differentiate_scores();
#pragma unroll 1
            while (next.left > 1) step<false>();
            step<true>();
        }
        barrier_sync_unaligned(kPReady, kConsumerThreads);  // nobody reads K and V any more: a consumer's warps do not end at once
        const int row = warp * 16, key = work.first_key + row;
        store_columns<Element, ShareV::kFirst>(p.d_v_map, dV, 1.0f, stages.value_tile(), row, key, work.head_kv, work.batch);
        store_columns<Element, Share::kFirst>(p.d_k_map, dK, p.scale, stages.key_tile(), row, key, work.head_kv, work.batch);
        if (lane == 0) cp_async_bulk_wait_group_read<0>();
    }
};
