// Turns (tile/common/turns.cuh) of consumers that add between products, where nobody should wait for memory. One thread beside the producer,
// the keeper, looks at the counters for all of them, and passes turns on. A counter is for all warps of a block. There is a keeper in
// a block only if its consumers add to each tile of the walk before they give the tile's stage of dO back.
//
// It hands a turn over at an mbarrier of the stage that the tile's dO is in, and that dO comes back when the consumers have added: so the
// keeper is never more than one tile behind them. Its release covers additions of other threads, since the mbarriers order them before it.

template <int kStages>
struct TurnKeeper {
    static constexpr int kBytes = kStages * 8;
    SharedAddress barriers;

    __device__ __forceinline__ SharedAddress turn(u32 stage) const { return barriers + stage * 8; }

    // By one thread, before a fence_mbarrier_init.
    __device__ __forceinline__ void initialise() const {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) mbarrier_init(turn(stage), 1);
    }
    // The consumers, before they add to the tile whose dO is in this stage.
    __device__ __forceinline__ void wait_turn(const StageOrder<kStages>& order) const { wait(turn(order.stage), order.parity); }

    // The keeper, for the whole walk. p.d_q_turns, [batch, heads_q, query_tiles], counts the key tiles that have added.
    template <int kBlockQ, int kBlockKv, class Parameters, class Chain>
    __device__ __forceinline__ void keep(const Parameters& p, const Chain& chain, const KeyWork& work,
                                         const Pipeline<kStages>& d_out_pipeline) const {
        griddepcontrol_wait();  // for counters of zero
        StageOrder<kStages> order;
#pragma unroll 1
        for (QueryWalk next(work, p); next.left > 0; next.advance(work, p)) {
            const u32 own = find_turn<kBlockQ, kBlockKv>(chain, next.tile, work.first_key / kBlockKv, p.len_q);
            u32* counter = p.d_q_turns + next.index;
            while (ld_acquire_gpu(counter) != own) {}
            mbarrier_arrive(turn(order.stage));
            wait(d_out_pipeline.empty(order.stage), order.parity);
            st_release_gpu(counter, own + 1);
            order.advance();
        }
    }
};
