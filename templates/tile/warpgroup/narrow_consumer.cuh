// A consumer of the backward kernels for head dims up to 128: one of two warpgroups that divide the keys of a work tile.

// A warpgroup, with 64 keys, whose dK and dV stay in registers. S and dP are transposed: P^T and dS^T are operands in registers.
template <class Traits, class Parameters>
struct NarrowConsumer {
    using Element = typename Traits::Element;
    using Stages = typename Traits::Stages;
    using DQShare = typename Traits::DQShare;
    static constexpr int kColumns = Traits::kColumns, kColumnsV = Traits::kColumnsV, kBlockQ = Traits::kBlockQ, kStages = Traits::kStages;
    static constexpr bool kSplit = Traits::kSplit;
    static constexpr int kConsumerThreads = 2 * 128;
    static constexpr int kConsumersMeet = 1;  // their named barrier
    // kSteps: of the products dV and dK. kEarlySteps: of dV, those issued before the barrier, to hide it.
    static constexpr int kSteps = kBlockQ / 16, kEarlySteps = kSplit ? 2 : kSteps;
    // Whether dO is released before dQ is added. Not for deterministic gradients: there the release says that dQ is added.
    static constexpr bool kReleasesEarly = !kSplit && !Traits::kDeterministic;

    const Parameters& p;
    const Stages& stages;
    const int warpgroup, warp, lane;  // warp: among those of both consumers
    PipelineState<kStages> state;
    PipelineState<Stages::kDScoresStages> d_s_state;

    __device__ __forceinline__ NarrowConsumer(const Parameters& p, const Stages& stages)
        : p(p), stages(stages), warpgroup(warp_index() / 4 - 1), warp(warp_index() - 4), lane(lane_index()) {}

    __device__ __forceinline__ void consumer_wait(const PipelineState<kStages>& next) const {
        stages.query_pipeline.consumer_wait(next);
        stages.d_out_pipeline.consumer_wait(next);
    }
    // By each warp: its lanes have read row_lse or row_delta.
    __device__ __forceinline__ void release(const Pipeline<kStages>& pipeline) const {
        barrier_warp_sync();
        pipeline.consumer_release(state.stage, lane == 0);
    }
    __device__ __forceinline__ static void barrier() { bar_sync(kConsumersMeet, kConsumerThreads); }

    // dK, without its scale, and dV of the warpgroup's keys; adds their dQ to the sums in memory.
    __device__ __forceinline__ void walk(const KeyWork& work, float (&dK)[kColumns / 8][4], float (&dV)[kColumnsV / 8][4]) {
//% if packed and (heads or opens)
        auto chain = Traits::make_chain(p, work.rows.len_q, work.rows.len_kv);
//% elif packed and links
        const auto chain = Traits::make_chain(p, work.rows.len_q, work.rows.len_kv);
//% elif packed
        const auto chain = Traits::make_chain(work.rows.len_q, work.rows.len_kv);
//% elif heads or opens
        auto chain = Traits::make_chain(p, p.len_q, p.len_kv);
//% elif links
        const auto chain = Traits::make_chain(p, p.len_q, p.len_kv);
//% else
        const auto chain = Traits::make_chain(p.len_q, p.len_kv);
//% endif
//% if opens
        chain.load_batch(work.batch);
//% endif
        const int first_key = work.first_key + warpgroup * 64;
//% if packed
        const QueryTileRange tiles = chain.template query_tiles<kBlockQ>(first_key, first_key + 64, work.rows.len_q);  // of its own keys
//% else
        const QueryTileRange tiles = chain.template query_tiles<kBlockQ>(first_key, first_key + 64, p.len_q);  // of this warpgroup's keys
//% endif
        float S[1][kBlockQ / 8][4], dP[1][kBlockQ / 8][4];
        u32 P[kBlockQ / 16][4], dS[kBlockQ / 16][4];
        auto wait_d_v = [&] {
            wgmma_wait_group<kSplit ? 1 : 0>();
            launder(dV);
        };
        typename Traits::Walk next(work, p);
//% if scatters
        if (next.left > 0) {
            consumer_wait(state);
            next.load(stages.words_of(state.stage), work, p);
        }
//% endif
//% if heads
        if (next.left > 0) chain = of_head(chain, work.batch, next.head(work, p));
//% endif
//% if fetches
        auto fetch = [&] {  // what the scores of the tile that is next have in memory
            const ScorePosition<true> position{work.first_key + warp * 16, next.tile * kBlockQ};
            const bool fetched = fetch_scores<kBlockQ>(chain, stages.fetched + warp * Stages::kFetchedBytes, position);
            set_fetched(chain, fetched ? stages.fetched + warp * Stages::kFetchedBytes : 0);
        };
        if (next.left > 0) fetch();
//% endif
//% if drops
        using Kept = KeptElements<1, kBlockQ / 8>;
        Kept kept{};  // of the tile that is next
        auto find_kept = [&] {
            return Kept::of(Dropout::of(p, work.batch, next.head(work, p)), work.first_key + warp * 16, next.tile * kBlockQ);
        };
        if (next.left > 0) kept = find_kept();
//% endif
//% if ahead
        auto find_terms = [&] {  // of the tile that is next
            return with_terms<1, kBlockQ / 8>(ScorePosition<true>{work.first_key + warp * 16, next.tile * kBlockQ}, chain);
        };
        auto position = find_terms();
//% endif
//% if not scatters
        if (next.left > 0) consumer_wait(state);
//% endif
#pragma unroll 1
        while (next.left > 0) {
            const auto queries = stages.query_tile(state.stage);
            const auto d_out = stages.d_out_tile(state.stage);
            const auto d_s_tile = stages.d_s_tile(d_s_state.stage);

            wgmma_fence();
            gemm_scores<Element, kColumns>(S[0], stages.key_tile(), warpgroup * 64, queries);
            wgmma_commit_group();
            wgmma_fence();
            gemm_scores<Element, kColumnsV>(dP[0], stages.value_tile(), warpgroup * 64, d_out);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            launder(S[0]);
//% if maps
            const ScorePosition<true> position{work.first_key + warp * 16, next.tile * kBlockQ};
            map_scores(S, position, chain);
//% if by_key
            if (unlikely(tiles.needs_mask(next.tile))) mask_by_key(S, work.first_key + warp * 16, next.tile * kBlockQ, chain);
//% else
            if (unlikely(tiles.needs_mask(next.tile))) mask_transposed(S, work.first_key + warp * 16, next.tile * kBlockQ, chain);
//% endif
//% if scatters
            if (next.hides) hide_scattered(S, ScorePosition<true>{work.first_key + warp * 16, next.tile * kBlockQ}, chain);
//% endif
            const SharedAddress row_lse = stages.lse(state.stage);
            const float* row_shift = p.row_shift + next.index * kBlockQ;
            if (unlikely(stages.huge(state.stage)))
                exponentiate_and_weigh<Element, true>(P, S, p.scale_log2, row_lse, row_shift, position, chain);
            else
                exponentiate_and_weigh<Element, false>(P, S, p.scale_log2, row_lse, row_shift, position, chain);
//% else
//% if adds
            RowOffset offset[1][2] = {};
//% if ahead
            add_terms(S, offset, position, chain);
//% else
            add_terms(S, offset, ScorePosition<true>{work.first_key + warp * 16, next.tile * kBlockQ}, chain);
//% endif
            if (unlikely(stages.huge(state.stage))) add_offsets(S, offset);
//% endif
//% if scatters
            if (unlikely(next.hides || tiles.needs_mask(next.tile) || stages.huge(state.stage))) {  // one branch: each holds up products
//% else
            if (unlikely(tiles.needs_mask(next.tile) || stages.huge(state.stage))) {  // one branch: each holds up the products
//% endif
                if (stages.huge(state.stage)) shift_transposed(S, p.row_shift + next.index * kBlockQ);
//% if by_key
                if (tiles.needs_mask(next.tile)) mask_by_key(S, work.first_key + warp * 16, next.tile * kBlockQ, chain);
//% else
                if (tiles.needs_mask(next.tile)) mask_transposed(S, work.first_key + warp * 16, next.tile * kBlockQ, chain);
//% endif
//% if scatters
                if (next.hides) hide_scattered(S, ScorePosition<true>{work.first_key + warp * 16, next.tile * kBlockQ}, chain);
//% endif
            }
//% if adds
            exponentiate(S, p.scale_log2, stages.lse(state.stage), offset);
//% else
            exponentiate(S, p.scale_log2, stages.lse(state.stage));
//% endif
//% if drops
#pragma unroll
            for (int step = 0; step < kSteps; ++step) round_kept<Element>(P[step], S, 0, step, kept);
//% else
            round_to_operand<Element>(P, S[0]);
//% endif
//% endif
            wgmma_wait_group<0>();
            launder(dP[0]);
//% if drops
            drop(dP, kept, 1.0f);  // differentiate scales it
            differentiate(dP, S, stages.delta(state.stage), p.dropout_scale);
//% else
            differentiate(dP, S, stages.delta(state.stage));
//% endif
//% if collects
            // A chain of its own: what this needs of it would take registers all the time.
//% if packed
            const auto own = of_head(Traits::make_chain(p, work.rows.len_q, work.rows.len_kv), work.batch, next.head(work, p));
//% else
            const auto own = of_head(Traits::make_chain(p, p.len_q, p.len_kv), work.batch, next.head(work, p));
//% endif
            collect_gradients<true>(dP, {work.first_key + warp * 16, next.tile * kBlockQ}, own);
//% endif
            round_to_operand<Element>(dS, dP[0]);
            store_transposed(d_s_tile, warp * 16, dS);

            launder(dV);
            launder(P);
            wgmma_fence();
            gemm_over_queries<Element, 0, kEarlySteps>(dV, P, d_out);
            wgmma_commit_group();
            // dS of both consumers is here then. One barrier a tile is enough, for two stages of dS: nobody comes here again before its dQ
            // of this tile is complete.
            fence_proxy_async();
            barrier();
            if (!kSplit) wait_d_v();  // dQ takes the registers of P; issued behind dV it would be no faster
            if (kReleasesEarly) release(stages.d_out_pipeline);

            DQShare d_q;
            wgmma_fence();
            d_q.gemm(d_s_tile, stages.key_tile(), warpgroup);
            wgmma_commit_group();
            if (kSplit) {
                launder(P);
                gemm_over_queries<Element, kEarlySteps, kSteps>(dV, P, d_out);
                wgmma_commit_group();
            }
            launder(dK);
            launder(dS);
            wgmma_fence();
            gemm_over_queries<Element, 0, kSteps>(dK, dS, queries);
            wgmma_commit_group();
            wgmma_wait_group<kSplit ? 2 : 1>();
            launder(d_q.dQ);
            if constexpr (Traits::kDeterministic) stages.keeper.wait_turn(state);
            d_q.add_to(p.d_q_sum + next.index * DQShare::Sums::kFloats, warp);  // while products are under way
            if (kSplit) wait_d_v();
            if (!kReleasesEarly) release(stages.d_out_pipeline);

            // What the next tile needs is awaited here: between products, each instruction would hold them up.
            PipelineState<kStages> following = state;
            following.advance();
//% if scatters
            if (--next.left > 0) {  // what follows is looked up by the producer
                consumer_wait(following);
                next.load(stages.words_of(following.stage), work, p);
            }
//% else
            next.advance(work, p);
//% endif
//% if heads
            if (next.left > 0) chain = of_head(chain, work.batch, next.head(work, p));
//% endif
//% if fetches
            if (next.left > 0) fetch();
//% endif
//% if drops
            if (next.left > 0) kept = find_kept();  // while the product of dK is under way
//% endif
//% if ahead
            if (next.left > 0) position = find_terms();
//% endif
//% if not scatters
            if (next.left > 0) consumer_wait(following);
//% endif
            wgmma_wait_group<0>();
            launder(dK);
            release(stages.query_pipeline);
            state = following;
            d_s_state.advance();
        }
    }
};
