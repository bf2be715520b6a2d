// The producer of the warp-specialised forward kernel: one thread that loads Q, K and V by tensor copies (FlashAttention-3, algorithm 1).

// Loads in the order in which consumers ask for tiles, for all work tiles of this thread block: K and V blocks from the last to the first,
// V one block behind K, and Q right after the first K block, so that K need not wait for a stage of Q, which may become free later.
template <class Traits, class Parameters>
__device__ __forceinline__ void produce(const Parameters& p, const ForwardStorage<Traits>& smem) {
    using Storage = ForwardStorage<Traits>;
    using Work = WorkTileInfo<Traits>;
    PipelineState<Traits::kQueryStages> q_state;
    PipelineState<kWorkSlots<Traits>> slot;  // index of a work slot; its parity is unused, as Q's pipeline guards the slots
    PipelineState<Traits::kStages> k_state, v_state;
//% if packed
    // Where the V that is due lies. Beside three consumers it would find no registers.
    auto keep_v = [&](int row, int head, int end) {
        store_shared_v4(smem.due_value, {static_cast<u32>(row), static_cast<u32>(head), static_cast<u32>(end), 0});
    };
    keep_v(-1, 0, 0);
    auto load_v = [&] {
        const uint4 due = load_shared_v4(smem.due_value);
        const int v_row = static_cast<int>(due.x), v_head = static_cast<int>(due.y), v_end = static_cast<int>(due.z);
        if (v_row < 0) return;
//% else
    int v_block = -1, v_head = 0, v_batch = 0;
    auto load_v = [&] {
        if (v_block < 0) return;
//% endif
        smem.v_pipeline.producer_acquire(v_state);
        smem.v_pipeline.producer_expect(v_state, Storage::ValueTile::kBytes);
//% if packed
        smem.value_tile(v_state.stage).load(p.v_map, smem.v_pipeline.full(v_state.stage), v_row, v_head, v_end);
//% else
        smem.value_tile(v_state.stage).load(p.v_map, smem.v_pipeline.full(v_state.stage), v_block * Traits::kBlockKv, v_head, v_batch);
//% endif
        v_state.advance();
    };
//% if scatters and not packed
    // Q of the next work tile is loaded when that is found, a K block early, where it has a stage.
    constexpr bool kEarlyQuery = Traits::kQueryStages > 1;
    auto load_q = [&](const Work& work) {
        smem.q_pipeline.producer_acquire(q_state);
        work.store(smem.work_slot(slot.stage));  // those who wait for Q see it, by the arrival of producer_expect
        slot.advance();
        smem.q_pipeline.producer_expect(q_state, Storage::QueryTile::kBytes);
        const SharedAddress q_full = smem.q_pipeline.full(q_state.stage);
        smem.query_tile(q_state.stage).load(p.q_map, q_full, work.coordinate1(), work.coordinate2(), work.batch);
        q_state.advance();
    };
//% endif
    prefetch_tensormap(p.q_map);
    prefetch_tensormap(p.k_map);
    prefetch_tensormap(p.v_map);
    int index = block_index();
//% if packed
    int head = Work::fetch(p, index, smem.found_work), next_head = 0;
//% endif
//% if scatters and not packed
    Work work = Work::find(p, index);
//% endif
//% if packed
#pragma unroll 1
    while (index < work_tiles(p)) {
//% else
#pragma unroll 1
    while (index < p.tiles) {
//% endif
//% if packed
        cp_async_wait_group<0>();
        const Work work = Work::fetched(p, smem.found_work, head);
//% if scatters
        const SeenTiles seen = Work::seen(p, smem.found_work, head);
//% endif
        work.store(smem.found_work);  // until Q is loaded: meanwhile it would take registers
//% elif not scatters
        const Work work = Work::find(p, index);
//% endif
        const int head_kv = divide(work.first_head, p.group_reciprocal);
//% if scatters
//% if not packed
        const SeenTiles seen = work.seen(p);
        const int batch = work.batch;
//% endif
        const int last_block = work.end_block - 1;
        int next = index, following = seen.before(last_block), after;
#pragma unroll 1
        for (int k_block = last_block; k_block >= 0; k_block = following, following = after) {
            after = following < 0 ? -1 : seen.before(following);
//% else
        const int last_block = work.end_block - 1, lowest_block = work.lowest_block(p);
        int next = index;
#pragma unroll 1
        for (int k_block = last_block; k_block >= lowest_block; --k_block) {
//% endif
            smem.k_pipeline.producer_acquire(k_state);
//% if scatters
            store_shared(smem.block_word(k_state.stage), SeenBlocks::word(k_block, following < 0, seen.hides(k_block)));
//% endif
            smem.k_pipeline.producer_expect(k_state, Storage::KeyTile::kBytes);
            const SharedAddress k_full = smem.k_pipeline.full(k_state.stage);
//% if packed
            const int k_row = work.rows.key_coordinate(k_block * Traits::kBlockKv), end_kv = work.rows.end_kv();
            smem.key_tile(k_state.stage).load(p.k_map, k_full, k_row, head_kv, end_kv);
//% else
            smem.key_tile(k_state.stage).load(p.k_map, k_full, k_block * Traits::kBlockKv, head_kv, work.batch);
//% endif
            k_state.advance();
//% if scatters and not packed
            if (k_block == last_block && (!kEarlyQuery || index == block_index())) load_q(work);
//% else
            if (k_block == last_block) {
                smem.q_pipeline.producer_acquire(q_state);
//% if packed
                const Work work = Work::load(smem.found_work);
//% endif
                work.store(smem.work_slot(slot.stage));  // those who wait for Q see it, by the arrival of producer_expect
                slot.advance();
                smem.q_pipeline.producer_expect(q_state, Storage::QueryTile::kBytes);
                const SharedAddress q_full = smem.q_pipeline.full(q_state.stage);
//% if packed
                smem.query_tile(q_state.stage).load(p.q_map, q_full, work.coordinate1(), work.coordinate2(), work.rows.end_q());
//% else
                smem.query_tile(q_state.stage).load(p.q_map, q_full, work.coordinate1(), work.coordinate2(), work.batch);
//% endif
                q_state.advance();
            }
//% endif
//% if scatters
            // The next work tile is claimed with the last block but one, and found with the last: both take their time.
//% if packed
            if (after < 0 && (following >= 0 || k_block == last_block)) {
                next = next_work_tile<Traits>(p, index);
                if (next < work_tiles(p)) next_head = Work::fetch(p, next, smem.found_work);
            }
//% else
            if (after < 0 && (following >= 0 || k_block == last_block)) next = next_work_tile<Traits>(p, index);
            if (following < 0 && next < p.tiles) {
                work = Work::find(p, next);
                if (kEarlyQuery) load_q(work);
            }
//% endif
//% else
            // The claim's latency stalls this thread, while consumers work on the stages that are full. The claim is made with the last K
            // block but one, where there are two, so that its latency does not add to that of finding the next work tile.
//% if packed
            // What it is comes from memory, while the last blocks are loaded.
            if (k_block == min(lowest_block + 1, last_block)) {
                next = next_work_tile<Traits>(p, index);
                if (next < work_tiles(p)) next_head = Work::fetch(p, next, smem.found_work);
            }
//% else
            if (k_block == min(lowest_block + 1, last_block)) next = next_work_tile<Traits>(p, index);
//% endif
//% endif
//% if packed
            load_v();
            keep_v(k_row, head_kv, end_kv);
//% elif scatters
            load_v();
            v_block = k_block, v_head = head_kv, v_batch = batch;
//% else
            load_v();
            v_block = k_block, v_head = head_kv, v_batch = work.batch;
//% endif
        }
        index = next;
//% if packed
        head = next_head;
//% endif
    }
    load_v();  // still due, being one block behind K
    // The end of the work: a slot with end_block == 0, announced by a stage of Q without a Q.
    smem.q_pipeline.producer_acquire(q_state);
    Work{}.store(smem.work_slot(slot.stage));
    smem.q_pipeline.producer_commit(q_state.stage, true);
}
