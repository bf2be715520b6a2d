// The dynamic tile scheduler of persistent backward blocks: a thread of each block claims work tiles from a counter in memory, one after
// the other, and hands them to the producer and the consumers of its block.
//
// No block waits for ever, however few are resident. The rounding of dQ waits until all work tiles of a head have added; blocks that run
// claim work tiles until none is left, whatever their own rounding waits for.

struct WorkClaims {
//% if packed
    static constexpr int kBytes = 64, kWarps = 8;  // kWarps: of consumers
//% else
    static constexpr int kBytes = 48, kWarps = 8;  // kWarps: of consumers
//% endif
    SharedAddress memory;                          // of a KeyWork, and three barriers

    // Barriers. full: the work tile is stored. empty: producer and consumers have read it, and its loads are issued. done: consumers have
    // read its K and V, and have added its dQ; the scheduler arrives, too, so that `done` does not complete again before it has looked.
//% if hides or packed or scatters
    // The producer need not: it has looked once it arrives at `empty`, and only then the scheduler arrives at `done`. Consumers may be
    // done before, as they do not wait for K and V of a work tile without query tiles.
//% else
    // The producer need not: it looks before it loads K and V, without which consumers end no work tile. So each must have a query tile.
//% endif
    __device__ __forceinline__ SharedAddress full() const { return memory + 24; }
    __device__ __forceinline__ SharedAddress empty() const { return memory + 32; }
    __device__ __forceinline__ SharedAddress done() const { return memory + 40; }

    // By one thread.
    __device__ __forceinline__ void initialise() const {
        mbarrier_init(full(), 1);
        mbarrier_init(empty(), kWarps + 1);
        mbarrier_init(done(), kWarps + 1);
    }
    // By one thread: claims until no work tile is left. find(i) is the one of number i; sums_complete(work) is called once its dQ is added.
//% if zeroes
    // handed_out(work): once others have it, and are done with the one before.
    template <class Parameters, class Find, class HandedOut, class SumsComplete>
    __device__ __forceinline__ void schedule(const Parameters& p, const Find& find, const HandedOut& handed_out,
                                             const SumsComplete& sums_complete) const {
//% else
    template <class Parameters, class Find, class SumsComplete>
    __device__ __forceinline__ void schedule(const Parameters& p, const Find& find, const SumsComplete& sums_complete) const {
//% endif
        KeyWork last = {-1};
//% if scatters
        griddepcontrol_wait();  // for the order of key tiles
//% endif
//% if packed
        griddepcontrol_wait();  // for the list
        const int work_tiles = WorkList::of(p).tiles * p.heads_kv;
//% endif
#pragma unroll 1
        for (u32 parity = 0;; parity ^= 1) {
            const int claimed = static_cast<int>(atom_add_acq_rel_gpu(p.tile_counter, 1));
            // Each block makes one claim that finds nothing. The launch makes no other claim after the last of these: the next launch
            // begins at 0.
//% if packed
            if (claimed == work_tiles + p.launched_blocks - 1) st_release_gpu(p.tile_counter, 0);
            const KeyWork work = claimed < work_tiles ? find(claimed) : KeyWork{-1};
//% else
            if (claimed == p.work_tiles + p.launched_blocks - 1) st_release_gpu(p.tile_counter, 0);
            const KeyWork work = claimed < p.work_tiles ? find(claimed) : KeyWork{-1};
//% endif
            store(work);
            mbarrier_arrive(full());
            if (last.first_key >= 0) {
                wait(done(), parity ^ 1);
                sums_complete(last);
            }
            if (work.first_key < 0) return;
//% if zeroes
            handed_out(work);
//% endif
//% if hides or packed or scatters
            last = work;
            wait(empty(), parity);
            mbarrier_arrive(done());
//% else
            mbarrier_arrive(done());
            last = work;
            wait(empty(), parity);
//% endif
        }
    }
    // By the producer and by the lanes of consumers' warps: waits for the next work tile. False if there is none.
    __device__ __forceinline__ bool take(KeyWork& work, u32 parity) const {
        wait(full(), parity);
        work = load();
        return work.first_key >= 0;
    }
    // The work tile that is there.
    __device__ __forceinline__ KeyWork load() const {
        const uint4 v = load_shared_v4(memory);
        // full_begin and full_end are not handed over, and are 0: each consumer finds them for its own 64 keys.
//% if packed
        const SequenceRows rows = SequenceRows::of(load_shared_v4(memory + 48));
        const int first_tile = static_cast<int>(load_shared(memory + 20));
        KeyWork work{static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), rows, first_tile, {static_cast<int>(v.w)}};
        work.tiles.end = static_cast<int>(load_shared(memory + 16));
//% elif scatters
        const KeyWork work{static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), static_cast<int>(v.w), {}};
//% else
        KeyWork work{static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), {static_cast<int>(v.w)}};
        work.tiles.end = static_cast<int>(load_shared(memory + 16));
//% endif
        return work;
    }

  private:
    __device__ __forceinline__ void store(const KeyWork& work) const {
//% if scatters
        store_shared_v4(memory, {static_cast<u32>(work.first_key), static_cast<u32>(work.head_kv), static_cast<u32>(work.batch),
                                 static_cast<u32>(work.key_tile)});
//% else
        store_shared_v4(memory, {static_cast<u32>(work.first_key), static_cast<u32>(work.head_kv), static_cast<u32>(work.batch),
                                 static_cast<u32>(work.tiles.begin)});
        store_shared(memory + 16, static_cast<u32>(work.tiles.end));
//% endif
//% if packed
        store_shared(memory + 20, static_cast<u32>(work.first_tile));
        store_shared_v4(memory + 48, work.rows.vector());
//% endif
    }
};
