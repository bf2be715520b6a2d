// Stages of shared memory that producers fill, by asynchronous copies or themselves, and consumers use up: two mbarriers for each stage say whose it is.

__device__ __forceinline__ void wait(SharedAddress barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {}
}

// The stage that is next, and the parity of its phase.
template <int kStages>
struct StageOrder {
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

    // By one thread. `producers` threads announce or hand over each stage, `consumers` release it.
    __device__ __forceinline__ void initialise(int producers, int consumers) const {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(full(stage), producers);
            mbarrier_init(empty(stage), consumers);
        }
    }
    // A producer: waits until the stage is free; announces the bytes that will land in it, or hands over what it wrote itself.
    __device__ __forceinline__ void wait_empty(const StageOrder<kStages>& next) const { wait(empty(next.stage), next.parity ^ 1); }
    __device__ __forceinline__ void announce(const StageOrder<kStages>& next, u32 bytes) const {
        mbarrier_arrive_expect_tx(full(next.stage), bytes);
    }
    __device__ __forceinline__ void hand_over(u32 stage, bool elected) const {
        if (elected) mbarrier_arrive(full(stage));
    }
    // The consumers: wait until the stage is filled; give it back.
    __device__ __forceinline__ void wait_full(const StageOrder<kStages>& next) const { wait(full(next.stage), next.parity); }
    __device__ __forceinline__ void release(u32 stage, bool elected) const {
        if (elected) mbarrier_arrive(empty(stage));
    }
};
