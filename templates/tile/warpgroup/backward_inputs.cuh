// What a work tile of a backward pass reads, in shared memory: its key tile, which stays until its end, and query tiles that go through the
// stages of two pipelines. A stage of queries has row_lse beside it, one of dO row_delta. The first of them bring K and V, too.

template <class Key, class Value, class Query, class DOut, class Lse, class Walk, int kStages>
struct BackwardInputs {
    static constexpr int kDeltaBytes = Lse::kRows * 4;  // of row_delta, for a query tile
    SharedAddress keys, values, queries, d_out, row_lse, row_delta;
//% if fetches
    static constexpr int kFetchedBytes = fetched_bytes<true>(Lse::kRows), kConsumerWarps = 8;
    SharedAddress fetched;  // by consumers' warps
//% endif
//% if scatters
    static constexpr int kWalkBytes = 8;
    SharedAddress walk_words;  // what the tile of a stage is: see HeadWalk
//% endif
    Pipeline<kStages> query_pipeline, d_out_pipeline;

    __device__ __forceinline__ explicit BackwardInputs(SharedRegions& regions)
        : keys(regions.take(Key::kBytes)), values(regions.take(Value::kBytes)), queries(regions.take(kStages * Query::kBytes)),
          d_out(regions.take(kStages * DOut::kBytes)) {}
    // Smaller than a tile: behind all tiles, which begin at multiples of 1024 bytes.
    __device__ __forceinline__ void take_rows(SharedRegions& regions) {
//% if fetches
        fetched = regions.take(kConsumerWarps * kFetchedBytes);
//% endif
        row_lse = regions.take(kStages * Lse::kBytes);
        row_delta = regions.take(kStages * kDeltaBytes);
//% if scatters
        walk_words = regions.take((kStages * kWalkBytes + 15) / 16 * 16);  // what follows may be read 16 bytes at a time
//% endif
        query_pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
        d_out_pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
    }
    // By one thread. `consumers`: warps that release a stage.
    __device__ __forceinline__ void initialise(int consumers) const {
        query_pipeline.initialise(1, consumers);
        d_out_pipeline.initialise(1, consumers);
        fence_mbarrier_init();
    }

    __device__ __forceinline__ Key key_tile() const { return {keys}; }
    __device__ __forceinline__ Value value_tile() const { return {values}; }
    __device__ __forceinline__ Query query_tile(u32 stage) const { return {queries + stage * Query::kBytes}; }
    __device__ __forceinline__ DOut d_out_tile(u32 stage) const { return {d_out + stage * DOut::kBytes}; }
    __device__ __forceinline__ SharedAddress lse(u32 stage) const { return row_lse + stage * Lse::kBytes; }
    __device__ __forceinline__ SharedAddress delta(u32 stage) const { return row_delta + stage * kDeltaBytes; }
//% if scatters
    __device__ __forceinline__ SharedAddress words_of(u32 stage) const { return walk_words + stage * kWalkBytes; }
//% endif
    // Whether a tile has huge rows, so that row_shift is to be subtracted from its scores.
    __device__ __forceinline__ bool huge(u32 stage) const { return load_shared(lse(stage) + Lse::kFlag * 4) != 0; }

    // By one thread: loads all that the consumers read.
    template <class Parameters>
    __device__ __forceinline__ void produce(const Parameters& p, const KeyWork& work) const {
        PipelineState<kStages> state;
        produce<false>(p, work, state, [&] { return work; });
    }
    // The same for one of a persistent block's work tiles. Its K and V come after its first Q and dO, once wait_keys() has returned: until
    // then consumers may read those of the work tile before. wait_keys() reads `work` again, so that registers need not keep all of it.
    template <bool kPersistent = true, class Parameters, class WaitKeys>
    __device__ __forceinline__ void produce(const Parameters& p, const KeyWork& work, PipelineState<kStages>& state,
                                            const WaitKeys& wait_keys) const {
        bool first = true;  // the first Q and dO do not depend on the preprocess kernel, which may still run; row_lse and row_delta do
//% if scatters
        Walk following(work, p);
#pragma unroll 1
        while (following.left > 0) {
            const Walk next = following;
            following.advance(work, p);
//% else
#pragma unroll 1
        for (Walk next(work, p); next.left > 0; next.advance(work, p)) {
//% endif
            const int row = next.tile * Lse::kRows;
            const SharedAddress queries_full = query_pipeline.full(state.stage), d_out_full = d_out_pipeline.full(state.stage);
            auto load_lse = [&] {
                cp_async_bulk_load(lse(state.stage), p.row_lse + next.index * Lse::kFloats, Lse::kBytes, queries_full);
            };
            auto load_delta = [&] {
                cp_async_bulk_load(delta(state.stage), p.row_delta + next.index * Lse::kRows, kDeltaBytes, d_out_full);
            };
            query_pipeline.producer_acquire(state);
//% if scatters
            next.store(words_of(state.stage), following.left == 0);
//% endif
            query_pipeline.producer_expect(state, Query::kBytes + Lse::kBytes + (first ? Key::kBytes : 0));
//% if packed
            auto load_keys = [&](const KeyWork& of) {
                key_tile().load(p.k_map, queries_full, of.rows.key_coordinate(of.first_key), of.head_kv, of.rows.end_kv());
            };
            auto load_values = [&](const KeyWork& of) {
                value_tile().load(p.v_map, d_out_full, of.rows.key_coordinate(of.first_key), of.head_kv, of.rows.end_kv());
            };
//% else
            auto load_keys = [&](const KeyWork& of) { key_tile().load(p.k_map, queries_full, of.first_key, of.head_kv, of.batch); };
            auto load_values = [&](const KeyWork& of) { value_tile().load(p.v_map, d_out_full, of.first_key, of.head_kv, of.batch); };
//% endif
            if (first && !kPersistent) load_keys(work);
            if (!first) load_lse();  // before the tile, which takes longer
//% if packed
            const int query = work.rows.query_coordinate(row), end_q = work.rows.end_q();
            query_tile(state.stage).load(p.q_map, queries_full, query, next.head(work, p), end_q);

//% else
            query_tile(state.stage).load(p.q_map, queries_full, row, next.head(work, p), work.batch);

//% endif
            d_out_pipeline.producer_acquire(state);
            d_out_pipeline.producer_expect(state, DOut::kBytes + kDeltaBytes + (first ? Value::kBytes : 0));
            if (first && !kPersistent) load_values(work);
            if (!first) load_delta();
//% if packed
            d_out_tile(state.stage).load(p.d_out_map, d_out_full, query, next.head(work, p), end_q);

//% else
            d_out_tile(state.stage).load(p.d_out_map, d_out_full, row, next.head(work, p), work.batch);

//% endif
            if (first && kPersistent) {
                const KeyWork again = wait_keys();
                load_keys(again);
                load_values(again);
            }
            if (first) {
                // What the preprocess kernel wrote is visible after this, to copies, too.
                griddepcontrol_wait();
                load_lse();
                load_delta();
            }
            state.advance();
            first = false;
        }
//% if hides or packed or scatters
        if (first) wait_keys();  // no query sees these keys
//% else
        if (first) wait_keys();  // no query sees these keys: never so in a persistent block (WorkClaims)
//% endif
    }
};
