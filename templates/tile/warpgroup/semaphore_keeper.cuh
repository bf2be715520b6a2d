// Semaphores (tile/common/semaphore.cuh) of consumers that add between products, where nobody should wait for memory. One thread beside the
// producer, the keeper, acquires and releases them for all consumers. A semaphore is for all warps of a block.
//
// It tells them at an mbarrier of the stage that the tile is in, and waits until all consumers have given something back that they
// give back after they have added: so it is never more than one tile behind them. Its release covers additions of other threads, since the
// mbarriers order them before it.

template <int kStages>
struct SemaphoreKeeper {
    static constexpr int kBytes = kStages * 8;
    SharedAddress barriers;

    __device__ __forceinline__ SharedAddress turn(u32 stage) const { return barriers + stage * 8; }

    // By one thread, before a fence_mbarrier_init.
    __device__ __forceinline__ void initialise() const {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) mbarrier_init(turn(stage), 1);
    }
    // The consumers, before they add to the tile in this stage.
    __device__ __forceinline__ void wait_turn(const PipelineState<kStages>& state) const { wait(turn(state.stage), state.parity); }

    // The keeper, for the whole walk. p.d_q_semaphores is [batch, heads_q, query_tiles, kSemaphores]; this block has `number`.
    // wait_added(state, last) returns once the consumers have given back what follows their additions to that tile.
    template <int kBlockQ, int kBlockKv, int kSemaphores, class Parameters, class Chain, class WaitAdded>
    __device__ __forceinline__ void keep(const Parameters& p, const Chain& chain, const KeyWork& work, int number,
                                         const WaitAdded& wait_added) const {
        griddepcontrol_wait();  // for semaphores of zero
        PipelineState<kStages> state;
#pragma unroll 1
        for (HeadWalk next(work, p); next.left > 0; next.advance(work, p)) {
//% if packed
            const u32 own = semaphore_value<kBlockQ, kBlockKv>(chain, next.tile, work.first_key / kBlockKv, work.rows.len_q);
//% else
            const u32 own = semaphore_value<kBlockQ, kBlockKv>(chain, next.tile, work.first_key / kBlockKv, p.len_q);
//% endif
            u32* semaphore = p.d_q_semaphores + next.index * kSemaphores + number;
            while (ld_acquire_gpu(semaphore) != own) {}
            mbarrier_arrive(turn(state.stage));
            wait_added(state, next.left == 1);
            st_release_gpu(semaphore, own + 1);
            state.advance();
        }
    }
};
