// The loop of a matrix product over its tiles: while one is used, the next ones are on their way.

// Calls use(tile, stage) for each of `tiles` tiles in order. Before that load(tile, stage) has started their copies, up to kStages - 1
// tiles ahead. `ring` is the first of kStages stages of `stage_bytes` each. Copies that the caller started before belong to the first
// tile's group.
template <int kStages, class Load, class Use>
__device__ __forceinline__ void for_each_tile(int tiles, SharedAddress ring, int stage_bytes, const Load& load, const Use& use) {
#pragma unroll
    for (int tile = 0; tile < kStages - 1; ++tile) {
        if (tile < tiles) load(tile, ring + tile * stage_bytes);
        cp_async_commit_group();
    }
    for (int tile = 0; tile < tiles; ++tile) {
        cp_async_wait_group<kStages - 2>();
        barrier_sync();  // every thread's copies of this tile have landed, and nobody reads the stage of the tile before any more
        const int next = tile + kStages - 1;
        if (next < tiles) load(next, ring + next % kStages * stage_bytes);
        cp_async_commit_group();  // a group without copies where no tile is left, so that their number stays the same
        use(tile, ring + tile % kStages * stage_bytes);
    }
}
