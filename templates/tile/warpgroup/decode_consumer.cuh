// A consumer of the decode kernel: one warpgroup, its 64 rows, and of its block's key tiles all or every other one. S, P and O stay in
// registers.

// One of kSharers * kKeyGroups consumers. Sharers work on a tile together: each has rows of its own, or a key/value head of its own with
// the rows that meet it. Those of the first key group write what comes out; with a second one they add its part first.
template <class Traits, class Parameters>
struct DecodeConsumer {
    using Element = typename Traits::Element;
    using Storage = DecodeStorage<Traits>;
    using Exchange = KeyGroupExchange<Traits>;
//% if not cached and not links
    using Chain = decltype(Traits::make_chain(Parameters{}));
//% endif
    static constexpr int kBlockKv = Traits::kBlockKv, kKeyGroups = Traits::kKeyGroups, kOutTiles = Traits::kColumnsV / 8;
    // Whether P V of a tile runs beside the softmax of the next one: two sharers begin a tile together, and nothing else would.
    static constexpr bool kPipelined = Traits::kSharers > 1;
//% if cached
    static constexpr int kCleared = 6;  // those of a key group and of a head have zeroed rows of V
//% endif
    static_assert(Traits::kStages % kKeyGroups == 0, "a stage is always of the same key group: parities of two would not tell its phases");

    const Parameters& p;
    const Storage& smem;
    const int sharer, key_group;
    const int tile_head, row_group;  // of the stage's key/value heads, and of the rows that meet it
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
          sharer(consumer / kKeyGroups),
          key_group(consumer % kKeyGroups),
          tile_head(sharer / Traits::kRowGroups),
          row_group(sharer % Traits::kRowGroups),
          tiles(RowTiles::of(p)),
//% if not cached and not links
          chain(Traits::make_chain(p)),
//% endif
          shares(shares),
          has_rows(shfl_sync_first(own_row(row_group, 0)) < tiles.rows()),
          softmax(p.scale_log2, p.ln2_hi) {}

    __device__ __forceinline__ void run(Part<Traits> part) {
        if (kKeyGroups > 1 && key_group == 0) Exchange::begin();
        int turn = 0;  // of the key groups
#pragma unroll 1
        for (; part.exists(); part.advance(shares)) {
            begin_part(part);
//% if hides
            const int first = modified.first_tile + part.first_in_head(), end = first + part.count();
//% else
            const int first = part.first_in_head(), end = first + part.count();
//% endif
//% if early
            if (has_rows) modified.load_ahead(turn == key_group ? first : first + 1);
//% endif
            smem.q_pipeline.consumer_wait(q_state);
            if constexpr (kPipelined) {
                work_on_all(first, end);
            } else {
                bool new_rows = true;
#pragma unroll 1
                for (int tile = first; tile < end; ++tile) {
                    const bool own = kKeyGroups == 1 || turn == key_group;
                    turn = (turn + 1) % kKeyGroups;
                    if (!own) continue;
                    work_on(tile, new_rows);
                    new_rows = false;
                }
            }
            barrier_warp_sync();
            smem.q_pipeline.consumer_release(q_state.stage, lane_index() == 0);
            q_state.advance();
            finish_part(part);
        }
    }

    // ---- a part of a head ----

    __device__ __forceinline__ void begin_part(const Part<Traits>& part) {
        const PackedRows rows = rows_of<Traits>(p, part.head, tile_head);
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
            epilogue(rows).find_parts(shares, part.head, part.is_first);
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
    __device__ __forceinline__ void work_on(int tile, bool new_rows) {
        u32 P[kBlockKv / 16][4] = {};
        issue_qk(tile);
        wgmma_wait_group<0>();
        make_p(P, tile, new_rows);
        rescale();
        drain(P);
    }
    // The same for all tiles of a part, where P V of the tile before runs beside the softmax.
    __device__ __forceinline__ void work_on_all(int first, int end) {
        if (first >= end) return;
        u32 P[2][kBlockKv / 16][4] = {};
        issue_qk(first);
        wgmma_wait_group<0>();
        make_p(P[0], first, true);
#pragma unroll 1
        for (;;) {
            if (++first == end) return drain(P[0]);
            iterate(P[0], P[1], first);
            if (++first == end) return drain(P[1]);
            iterate(P[1], P[0], first);
        }
    }
    __device__ __forceinline__ void iterate(u32 (&P)[kBlockKv / 16][4], u32 (&P_next)[kBlockKv / 16][4], int tile) {
        const u32 stage = own_stage();
        state.advance();
        launder(O);
        launder(P);
        issue_qk(tile);
        issue_pv(P, stage);
        wgmma_wait_group<1>();
        make_p(P_next, tile, false);
        retire_pv(stage);
        rescale();
    }
    __device__ __forceinline__ void drain(u32 (&P)[kBlockKv / 16][4]) {
        launder(O);
        launder(P);
        issue_pv(P, own_stage());
        retire_pv(own_stage());
        state.advance();
    }
    __device__ __forceinline__ u32 own_stage() const { return state.stage * kKeyGroups + key_group; }
    __device__ __forceinline__ void issue_qk(int tile) {
        const u32 stage = own_stage();
//% if looks
        if (has_rows) modified.look(tile);
//% endif
        wait(smem.pipeline.full(stage), state.parity);
        wgmma_fence();
        gemm_scores<Element, Traits::kColumns>(S, smem.q_tile(q_state.stage, tile_head), row_group * 64, smem.key_tile(stage, tile_head));
        wgmma_commit_group();
//% if cached
        keys.clear_others(smem.value_tile(stage, tile_head), tile, row_group, Traits::kRowGroups, kCleared + tile_head + key_group);
//% endif
    }
    // Once S is there.
    __device__ __forceinline__ void make_p(u32 (&P)[kBlockKv / 16][4], int tile, bool new_rows) {
        launder(S);
        if (!has_rows) return;
//% if changes
        modified.change(S, tile);
//% endif
//% if early
        modified.load_ahead(tile + kKeyGroups);
//% endif
//% if hides
        const bool masked = tile >= first_masked || modified.may_begin_in(tile);
//% elif cached
        const bool masked = tile >= first_masked || keys.begin_in(tile);
//% else
        const bool masked = tile >= first_masked;
//% endif
        if (masked) mask(tile);
        softmax.exp2_and_sum(P, S, new_rows || masked);
    }
    __device__ __forceinline__ void rescale() {
        if (has_rows && softmax.needs_rescale) softmax.rescale(O);
    }
    // O and P must have been laundered, before S where its product is under way.
    __device__ __forceinline__ void issue_pv(const u32 (&P)[kBlockKv / 16][4], u32 stage) {
        wgmma_fence();
        gemm_output<Element>(O, P, smem.value_tile(stage, tile_head));
        wgmma_commit_group();
    }
    __device__ __forceinline__ void retire_pv(u32 stage) {
        wgmma_wait_group<0>();
        launder(O);
        smem.pipeline.consumer_release(stage, thread_index() % 128 == 0);
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

    __device__ __forceinline__ DecodeEpilogue<Traits, Parameters> epilogue(const PackedRows& rows) const {
        return {p, smem, rows, tiles, sharer, tile_head, row_group};
    }

    __device__ __forceinline__ void finish_part(const Part<Traits>& part) {
        const PackedRows rows = rows_of<Traits>(p, part.head, tile_head);  // once more: nothing of it is needed between begin and end
        const auto epilogue = this->epilogue(rows);
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
            Exchange{smem, has_rows}.store(O, own);
            if (!helps || part.is_whole()) return;
        } else {
            float totals[2] = {fabsf(own.rows[0].total), fabsf(own.rows[1].total)};
            Origin origins[2] = {own.rows[0].origin(), own.rows[1].origin()};
            if constexpr (kKeyGroups > 1) {
                Exchange{smem, has_rows}.add(O, totals, origins, p.scale_log2);
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
};
