// Two consumers that divide the work on scores, each with all keys of a block as rows of its accumulator: the first warpgroup computes S^T
// and P^T, the second one dP^T and dS^T. P and dS pass through shared memory, in tiles with a row for each query.

// S^T or dP^T of the tile in a stage, once it is there. Issued, not waited for. stages.operand(tile) is how a product takes a tile.
template <class Element, int kWarpgroup, int kColumns, int kColumnsV, class Stages, class State, int kTiles>
__device__ __forceinline__ void issue_scores(float (&product)[kTiles][4], const Stages& stages, const State& state) {
    (kWarpgroup == 0 ? stages.query_pipeline : stages.d_out_pipeline).consumer_wait(state);
    launder(product);
    wgmma_fence();
    if constexpr (kWarpgroup == 0)
        gemm_scores<Element, kColumns>(product, stages.operand(stages.key_tile()), 0, stages.operand(stages.query_tile(state.stage)));
    else
        gemm_scores<Element, kColumnsV>(product, stages.operand(stages.value_tile()), 0, stages.operand(stages.d_out_tile(state.stage)));
    wgmma_commit_group();
}

// P^T of S^T, rounded, of the tile `next` in a stage. `first_key`: of the warp.
template <class Element, int kBlockQ, class Stages, class Parameters, class Chain>
__device__ __forceinline__ void round_probabilities(u32 (&P)[kBlockQ / 16][4], float (&S)[1][kBlockQ / 8][4], const Parameters& p,
                                                    const Stages& stages, u32 stage, const QueryTileRange& tiles, const HeadWalk& next,
                                                    int first_key, const Chain& chain) {
//% if adds
    change_scores(S, ScorePosition<true>{first_key, next.tile * kBlockQ}, chain);
//% endif
//% if by_key
    if (tiles.needs_mask(next.tile)) mask_by_key(S, first_key, next.tile * kBlockQ, chain);
//% else
    if (tiles.needs_mask(next.tile)) mask_transposed(S, first_key, next.tile * kBlockQ, chain);
//% endif
    if (unlikely(stages.huge(stage))) shift_transposed(S, p.row_shift + next.index * kBlockQ);
    exponentiate(S, p.scale_log2, stages.lse(stage));
    round_to_operand<Element>(P, S[0]);
}

// dS^T of dP^T and of P as a tile has it, into another tile.
template <class Element, class ScoreTile, int kTiles>
__device__ __forceinline__ void store_score_gradients(const ScoreTile& tile, const float (&dP)[kTiles][4], const ScoreTile& P_tile,
                                                      SharedAddress delta, int warp) {
    u32 P[kTiles / 2][4], dS[kTiles / 2][4];
    load_transposed(P, P_tile, warp * 16);
    differentiate_rounded<Element>(dS, dP, P, delta);
    store_transposed(tile, warp * 16, dS);
    fence_proxy_async();
}
