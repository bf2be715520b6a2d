// A pipeline of stages in shared memory between producers, which fill them, and consumers, which use them up: a full and an empty mbarrier
// for each stage. The names follow CUTLASS's PipelineTmaAsync, but producer_acquire only waits, producer_expect announces the bytes, and
// both states begin with parity 0.

__device__ __forceinline__ void wait(SharedAddress barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {}
}

// Which stage a producer or a consumer comes to next, and the parity of that stage's phase.
template <int kStages>
struct PipelineState {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <int kStages>
struct Pipeline {
    static constexpr int kBytes = kStages * 16;
    SharedAddress barriers;

    __device__ __forceinline__ SharedAddress full(u32 stage) const { return barriers + stage * 16; }
    __device__ __forceinline__ SharedAddress empty(u32 stage) const { return barriers + stage * 16 + 8; }

    // One thread calls this. `producers` threads expect bytes in each stage or commit it; `consumers` threads release it.
    __device__ __forceinline__ void initialise(int producers, int consumers) const {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(full(stage), producers);
            mbarrier_init(empty(stage), consumers);
        }
    }
    // A producer waits until the stage is empty. Then it says how many bytes its copies will bring, or commits what threads have written.
    __device__ __forceinline__ void producer_acquire(const PipelineState<kStages>& state) const {
        wait(empty(state.stage), state.parity ^ 1);
    }
    __device__ __forceinline__ void producer_expect(const PipelineState<kStages>& state, u32 bytes) const {
        mbarrier_arrive_expect_tx(full(state.stage), bytes);
    }
    __device__ __forceinline__ void producer_commit(u32 stage, bool elected) const {
        if (elected) mbarrier_arrive(full(stage));
    }
    // A consumer waits until the stage is full, and releases it.
    __device__ __forceinline__ void consumer_wait(const PipelineState<kStages>& state) const { wait(full(state.stage), state.parity); }
    __device__ __forceinline__ void consumer_release(u32 stage, bool elected) const {
        if (elected) mbarrier_arrive(empty(stage));
    }
};
