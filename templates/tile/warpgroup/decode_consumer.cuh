// A consumer of the decode kernel: one warpgroup, its 64 rows, and of its block's key tiles all or every other one. S, P and O stay in
// registers.

// One of kRowGroups * kKeyGroups consumers. Those of the first key group write what comes out; with a second one they add its part first.
template <class Traits, class Parameters>
struct DecodeConsumer {
    using Element = typename Traits::Element;
    using Storage = DecodeStorage<Traits>;
//% if not cached and not links
    using Chain = decltype(Traits::make_chain(Parameters{}));
//% endif
    static constexpr int kBlockKv = Traits::kBlockKv, kKeyGroups = Traits::kKeyGroups, kOutTiles = Traits::kColumnsV / 8;
    static constexpr int kFilled = 1, kEmptied = 2, kPair = 2 * 128;  // barriers: the second key group has written; the first one has read
//% if cached
    static constexpr int kCleared = 6;  // those of a key group have zeroed rows of V
//% endif
    static_assert(Traits::kStages % kKeyGroups == 0, "a stage is always of the same key group: parities of two would not tell its phases");

    const Parameters& p;
    const Storage& smem;
    const int row_group, key_group;
    const RowTiles tiles;
//% if cached
    TiledKeys<kBlockKv> keys;  // of the part's sequence
//% endif
//% if links
    DecodeScores<Traits, Parameters> modified;
//% elif not cached
    const Chain chain;
//% endif
    const Shares<Traits>& shares;
    const bool has_rows;  // whether this warp has any: else it computes nothing but the products, which need all warps
    PipelineState<Traits::kQueryStages> q_state;
    PipelineState<Traits::kStages / kKeyGroups> state;  // of the own stages
//% if links
    OnlineSoftmax<Element, !DecodeScores<Traits, Parameters>::kKeysMayBeginLate> softmax;
//% else
    OnlineSoftmax<Element, true> softmax;
//% endif
    float S[kBlockKv / 8][4];
    float O[kOutTiles][4];
    int ends_of_keys[2];  // that the thread's two rows see
    int first_masked;     // key tile: those before it are seen whole by every row

    __device__ __forceinline__ DecodeConsumer(const Parameters& p, const Storage& smem, const Shares<Traits>& shares, int consumer)
        : p(p),
          smem(smem),
          row_group(consumer / kKeyGroups),
          key_group(consumer % kKeyGroups),
          tiles(RowTiles::of(p)),
//% if not cached and not links
          chain(Traits::make_chain(p)),
//% endif
          shares(shares),
          has_rows(shfl_sync_first(own_row(row_group, 0)) < tiles.rows()),
          softmax(p.scale_log2, p.ln2_hi) {}

    __device__ __forceinline__ void run(Part<Traits> part) {
        if (kKeyGroups > 1 && key_group == 0) bar_arrive(kEmptied, kPair);
        int turn = 0;  // of the key groups
#pragma unroll 1
        for (; part.exists(); part.advance(shares)) {
            begin_part(part);
//% if hides
            const int first = modified.first_tile + part.first_in_head(), end = first + part.count();
//% else
            const int first = part.first_in_head(), end = first + part.count();
//% endif
            bool new_rows = true;
//% if early
            if (has_rows) modified.load_ahead(turn == key_group ? first : first + 1);
//% endif
            smem.q_pipeline.consumer_wait(q_state);
#pragma unroll 1
            for (int tile = first; tile < end; ++tile) {
                const bool own = kKeyGroups == 1 || turn == key_group;
                turn = (turn + 1) % kKeyGroups;
                if (!own) continue;
//% if hides
                work_on(tile, new_rows, tile >= first_masked || modified.may_begin_in(tile));
//% elif cached
                work_on(tile, new_rows, tile >= first_masked || keys.begin_in(tile));
//% else
                work_on(tile, new_rows, tile >= first_masked);
//% endif
                new_rows = false;
            }
            barrier_warp_sync();
            smem.q_pipeline.consumer_release(q_state.stage, lane_index() == 0);
            q_state.advance();
            finish_part(part);
        }
    }

    // ---- a part of a head ----

    __device__ __forceinline__ void begin_part(const Part<Traits>& part) {
        const PackedRows rows = rows_of(p, part.head);
//% if cached
        keys = TiledKeys<kBlockKv>::of(shares.key_tiles, shares.key_tiles.sequences.span(part.head.batch));
//% if links
        modified.begin(p, rows, tiles, row_group, keys.end - keys.front, keys.front);
        const auto& chain = modified.chain;
//% else
        const auto chain = Traits::make_chain(p, keys.end - keys.front);
//% endif
        first_masked = max(0, keys.front + chain.keys(rows.first_query).end) / kBlockKv;
//% else
//% if links
        modified.begin(p, rows, tiles, row_group, p.len_kv, 0);
        const auto& chain = modified.chain;
//% endif
        first_masked = max(0, chain.keys(rows.first_query).end) / kBlockKv;
//% endif
//% if looks
        first_masked = min(first_masked, modified.first_looked_at());  // there a row may see its first key
//% endif
        if (!part.is_whole() && key_group == 0 && thread_index() % 128 == 0)
            DecodeEpilogue<Traits, Parameters>{p, smem, rows, tiles, row_group}.find_parts(shares, part.head, part.is_first);
#pragma unroll
//% if cached
        for (int h = 0; h < 2; ++h) ends_of_keys[h] = keys.front + chain.keys(rows.query(tiles, own_row(row_group, h))).end;
//% else
        for (int h = 0; h < 2; ++h) ends_of_keys[h] = chain.keys(rows.query(tiles, own_row(row_group, h))).end;
//% endif
#pragma unroll
        for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) O[j][e] = 0.0f;
        softmax.restart();
    }

    // FlashAttention-2, algorithm 1, lines 8 to 10, for one key tile. While one key group works the other one's products run.
    __device__ __forceinline__ void work_on(int tile, bool new_rows, bool masked) {
        const u32 stage = state.stage * kKeyGroups + key_group;
//% if looks
        if (has_rows) modified.look(tile);
//% endif
        wait(smem.pipeline.full(stage), state.parity);
        wgmma_fence();
        gemm_scores<Element, Traits::kColumns>(S, smem.q_tile(q_state.stage), row_group * 64, smem.key_tile(stage));
        wgmma_commit_group();
//% if cached
        keys.clear_others(smem.value_tile(stage), tile, row_group, Traits::kRowGroups, kCleared + key_group);
//% endif
        wgmma_wait_group<0>();
        launder(S);
        u32 P[kBlockKv / 16][4] = {};
        if (has_rows) {
//% if changes
            modified.change(S, tile);
//% endif
//% if early
            modified.load_ahead(tile + kKeyGroups);
//% endif
            if (masked) mask(tile);
            softmax.exp2_and_sum(P, S, new_rows || masked);
            if (softmax.needs_rescale) softmax.rescale(O);
        }
        launder(O);
        launder(P);
        wgmma_fence();
        gemm_output<Element>(O, P, smem.value_tile(stage));
        wgmma_commit_group();
        wgmma_wait_group<0>();
        launder(O);
        smem.pipeline.consumer_release(stage, thread_index() % 128 == 0);
        state.advance();
    }
    __device__ __forceinline__ void mask(int tile) {
//% if hides
        const int begins_of_keys[2] = {modified.begin_of_keys(0), modified.begin_of_keys(1)};
//% endif
#pragma unroll
        for (int j = 0; j < kBlockKv / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
//% if hides
                if (const int row = tile * kBlockKv + j * 8 + lane_index() % 4 * 2 + e % 2;
                    row < begins_of_keys[e / 2] || row >= ends_of_keys[e / 2])
                    S[j][e] = -infinity();
//% elif cached
                if (const int row = tile * kBlockKv + j * 8 + lane_index() % 4 * 2 + e % 2; row < keys.front || row >= ends_of_keys[e / 2])
                    S[j][e] = -infinity();
//% else
                if (tile * kBlockKv + j * 8 + lane_index() % 4 * 2 + e % 2 >= ends_of_keys[e / 2]) S[j][e] = -infinity();
//% endif
    }

    // ---- what comes of it ----

    __device__ __forceinline__ void finish_part(const Part<Traits>& part) {
        const PackedRows rows = rows_of(p, part.head);  // once more: nothing of it is needed between begin and end
        const DecodeEpilogue<Traits, Parameters> epilogue{p, smem, rows, tiles, row_group};
        // The second key group has nothing else to do once the block's last part is there: then it helps to add up.
        const bool helps = kKeyGroups > 1 && part.is_last();
        float normalisers[2];
//% if joins
        const float sinks[2] = {p.sinks[rows.head_that_is(tiles, own_row(row_group, 0))],
                                p.sinks[rows.head_that_is(tiles, own_row(row_group, 1))]};
        const PairStatistics own = softmax.finish(normalisers, sinks, p.sinks_unit, p.ln2_lo);
//% else
        const PairStatistics own = softmax.finish(normalisers);
//% endif
        if (kKeyGroups > 1 && key_group > 0) {
            hand_over_part(own);
            if (!helps || part.is_whole()) return;
        } else {
            float totals[2] = {fabsf(own.rows[0].total), fabsf(own.rows[1].total)};
            Origin origins[2] = {own.rows[0].origin(), own.rows[1].origin()};
            if constexpr (kKeyGroups > 1) {
                add_part(totals, origins);
//% if joins
                for (int h = 0; h < 2; ++h)
                    normalisers[h] =
                        normaliser_with_sink(totals[h], height_of_sink(sinks[h], origins[h], p.sinks_unit, p.ln2_hi, p.ln2_lo));
//% else
                normalisers[0] = normaliser(totals[0]), normalisers[1] = normaliser(totals[1]);
//% endif
            }
            if (part.is_whole()) return epilogue.store_rows(O, totals, origins, normalisers);
            epilogue.store_partial_rows(O, totals, origins, part.is_first);
        }
        epilogue.merge_if_last(key_group, helps ? 2 : 1, part.is_first);
    }
    // From one key group to the other: O in the order of registers, so many column tiles at a time, and the statistics.
    __device__ __forceinline__ SharedAddress handed(int tile) const { return smem.handed + (tile * 128 + thread_index() % 128) * 16; }
    __device__ __forceinline__ void hand_over_part(const PairStatistics& own) const {
#pragma unroll
        for (int first = 0; first < kOutTiles; first += Storage::kHandedTiles) {
            bar_sync(kEmptied, kPair);
            if (first == 0) own.store(smem.statistics);
            if (has_rows) {
#pragma unroll
                for (int j = first; j < min(first + Storage::kHandedTiles, kOutTiles); ++j)
                    store_shared_v4(handed(j - first), {__float_as_uint(O[j][0]), __float_as_uint(O[j][1]), __float_as_uint(O[j][2]),
                                                        __float_as_uint(O[j][3])});
            }
            bar_arrive(kFilled, kPair);
        }
    }
    __device__ __forceinline__ void add_part(float (&totals)[2], Origin (&origins)[2]) {
        float factors[2][2];
#pragma unroll
        for (int first = 0; first < kOutTiles; first += Storage::kHandedTiles) {
            bar_sync(kFilled, kPair);
            if (first == 0) {
                const uint4 v = load_shared_v4(smem.statistics + (thread_index() / 32 % 4 * 8 + lane_index() / 4) * 16);
                const RowStatistics other[2] = {{__uint_as_float(v.x), __uint_as_float(v.y)}, {__uint_as_float(v.z), __uint_as_float(v.w)}};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const CommonOrigin common = CommonOrigin::of(origins[h], other[h].origin(), p.scale_log2);
                    totals[h] = common.total(totals[h], fabsf(other[h].total));
                    origins[h] = common.origin;
                    factors[h][0] = common.factors[0], factors[h][1] = common.factors[1];
                }
            }
            if (has_rows) {
#pragma unroll
                for (int j = first; j < min(first + Storage::kHandedTiles, kOutTiles); ++j) {
                    const uint4 v = load_shared_v4(handed(j - first));
                    const u32 given[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int e = 0; e < 4; ++e) O[j][e] = O[j][e] * factors[e / 2][0] + __uint_as_float(given[e]) * factors[e / 2][1];
                }
            }
            bar_arrive(kEmptied, kPair);
        }
    }
};
