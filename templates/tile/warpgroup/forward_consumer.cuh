// A consumer of the warp-specialised forward kernel: one warpgroup and its 64 rows of every work tile of this thread block. S, P and O
// stay in registers.

template <class Traits, class Parameters>
struct ForwardConsumer {
    using Element = typename Traits::Element;
    using Work = WorkTileInfo<Traits>;
    using Chain = decltype(Work{}.chain(Parameters{}));
    using Blocks = decltype(Work{}.blocks(Parameters{}));
    static constexpr int kBlockKv = Traits::kBlockKv, kPackGqa = Traits::kPackGqa;
    static constexpr int kOwnQueries = 64 / kPackGqa;  // distinct queries in a consumer's rows
    // Barrier kFirstBarrier + i is consumer i's turn: its 128 threads wait, and those of the consumer before it arrive.
    static constexpr int kFirstBarrier = 1, kPingPongThreads = 2 * 128;
    static_assert(!Traits::kPingPong || Traits::kConsumers > 1, "ping-pong scheduling takes two consumers");
    static_assert(!Traits::kPingPong || Traits::kStages > 1,
                  "one stage deadlocks: a consumer holds its turn until V comes, and the other frees V's stage only in its own next turn");
    using Fragment = u32[kBlockKv / 16][4];  // P as an operand of P V

    const Parameters& p;
    const ForwardStorage<Traits>& smem;
    const int consumer;
    const bool elected;
    PipelineState<Traits::kQueryStages> q_state;
    PipelineState<kWorkSlots<Traits>> slot;  // index of the next work slot
    PipelineState<Traits::kStages> k_state, v_state;
    PipelineState<1> statistics_state;
    OnlineSoftmax<Element, Traits::kStaleRowMax> softmax;
    float S[1][kBlockKv / 8][4];              // one row tile, 16 rows of each warp: mask_scores takes several
    float O[Traits::kColumnsV / 8][4] = {};
    Fragment P[2];                            // one is multiplied with V while softmax writes the other
    SharedAddress current = 0, finished = 0;  // slots of the current work tile, and of the one whose O is to be stored
//% if scatters
    int first_query, k_block;                 // of the current work tile
    SeenBlocks seen;                          // its K blocks
//% else
    int first_query, k_block, lowest_block;   // of the current work tile
//% endif
    Chain chain;                              // of its sequence
//% if drops
    Dropout dropout;                          // of its head, the first one under PackGQA
//% endif
//% if fetches
    SharedAddress fetched = 0;                // where what the next scores have in memory was copied to, or 0
//% endif
    // K blocks that this consumer's rows see, for the mask alone: every consumer visits all blocks of the work tile, as the turns of
    // ping-pong scheduling and the releases of K and V must match in number.
    Blocks own_blocks;
//% if linear
    LinearTerms<kBlockKv, kPackGqa> terms;
//% endif
    float normalisers[2];
//% if overwrites
    bool store_pending = false, accumulate = true;  // the first: once the P V under way is complete, O is to be stored by retire_pv
//% else
    bool store_pending = false;  // once the P V under way is complete, O is the finished work tile's, and retire_pv stores it
//% endif
    int v_stage_in_use = -1;     // that the P V under way reads

    __device__ __forceinline__ ForwardConsumer(const Parameters& p, const ForwardStorage<Traits>& smem, int consumer)
        : p(p), smem(smem), consumer(consumer), elected(thread_index() % 128 == 0), softmax(p.scale_log2, p.ln2_hi) {}

    // One iteration of FlashAttention-3, algorithm 2 (lines 8 to 15): S = Q K^T of this block runs beside O += P V of the block before, and
    // softmax runs under that product. P_prev is the paper's P_cur: P[0] and P[1] swap roles, in place of line 16. Blocks go from the last
    // to the first. The first S of a work tile overlaps the last product of the tile before, so the pipeline never drains. Line 20 is
    // finish_tile, and store_output in retire_pv. Returns false at the end of the work; P_prev is then left to `drain`.
    __device__ __forceinline__ bool iterate(Fragment& P_prev, Fragment& P_next) {
//% if scatters
        const bool new_tile = seen.is_last;
        if (new_tile && !wait_for_work()) return false;
//% else
        const bool new_tile = --k_block < lowest_block;
        if (new_tile && !wait_for_work()) return false;
//% endif
        wait_ping_pong();       // section 3.1: one consumer issues products while another does softmax
        issue_qk();             // lines 8, 9: S = Q K^T
//% if linear
        terms.prepare(k_block, softmax.row_max[0]);  // while the product runs, nobody waits for this warp
//% endif
        wgmma_wait_group<1>();  // lines 14, 15 of the iteration before: O += P V is complete
        retire_pv();            // rescale or store O, release V: O must be free before the next product
        // Between Q K^T and P V while the other consumer, which waits for the turn, does softmax: behind P V nothing would hide this.
//% if folds
        constexpr bool kEarly = false;  // at head dim 192 it would spill
//% else
        constexpr bool kEarly = Traits::kPingPong;
//% endif
        if (kEarly && new_tile) change_tile();
        issue_pv(P_prev);       // lines 10, 11: O += P V
        arrive_ping_pong();
        if (!kEarly && new_tile) change_tile();
        wgmma_wait_group<1>();  // line 12: S is here
        v_stage_in_use = v_state.stage;
        v_state.advance();
        make_p(P_next, new_tile);  // line 15 for K, line 13: row_max, P, row_sum
        if (new_tile) softmax.needs_rescale = false;  // retire_pv stores O next: said here, so that the compiler drops the factors
        return true;
    }
    // The K block visited last of all has no Q K^T beside its P V (lines 18, 19).
    __device__ __forceinline__ void drain(Fragment& P_last) {
        wgmma_wait_group<0>();
        retire_pv();
        issue_pv(P_last);
        finish_tile();
        if (p.lse != nullptr) hand_statistics_over({});  // the LSE writer finds the end of the work in the next slot
        wgmma_wait_group<0>();
        v_stage_in_use = -1;  // nobody fills the stage again
        retire_pv();
        if (lane_index() == 0) cp_async_bulk_wait_group_read<0>();  // shared memory must live until the copies of O have read it
    }
    __device__ __forceinline__ void run() {
        wait_for_work();  // the grid has no more thread blocks than work tiles, so each has a first one
        begin_tile();
        // Gives consumer 0 the first turn. No other consumer has arrived at its barrier yet, so its own 128 threads do, and count a second
        // time when they wait: a named barrier counts arrivals. The last consumer's last arrival has no partner; the end of the thread
        // block drops it.
        if (Traits::kPingPong && consumer == 0) bar_arrive(kFirstBarrier, kPingPongThreads);
        issue_qk();  // lines 3 to 6
        wgmma_wait_group<0>();
        make_p(P[0], true);
        softmax.needs_rescale = false;  // O is zero
#pragma unroll 1
        for (;;) {
            if (!iterate(P[0], P[1])) return drain(P[0]);
            if (!iterate(P[1], P[0])) return drain(P[1]);
        }
    }

    // ---- the steps of an iteration ----

    __device__ __forceinline__ void wait_ping_pong() const {
        if (Traits::kPingPong) bar_sync(kFirstBarrier + consumer, kPingPongThreads);
    }
    __device__ __forceinline__ void arrive_ping_pong() const {
        if (Traits::kPingPong) bar_arrive(kFirstBarrier + (consumer + 1) % Traits::kConsumers, kPingPongThreads);
    }

    __device__ __forceinline__ void issue_qk() {
        smem.k_pipeline.consumer_wait(k_state);
        wgmma_fence();
        gemm_scores<Element, Traits::kColumns>(S[0], smem.query_tile(q_state.stage), consumer * 64, smem.key_tile(k_state.stage));
        wgmma_commit_group();
//% if scatters
        k_block = seen.read(smem.block_word(k_state.stage));  // while the product is under way
//% endif
    }
    __device__ __forceinline__ void issue_pv(Fragment& P_used) {
        smem.v_pipeline.consumer_wait(v_state);
        launder(O);  // S needs none in issue_qk: its first product only writes it
        // P needs none after the product, either: it is written next from S, which make_p launders once this product is complete.
        launder(P_used);
        wgmma_fence();
//% if overwrites
        gemm_output<Element>(O, P_used, smem.value_tile(v_state.stage), accumulate);
        accumulate = true;
//% else
        gemm_output<Element>(O, P_used, smem.value_tile(v_state.stage));
//% endif
        wgmma_commit_group();
    }
    // Once S is here: masks it where own_blocks says so (see key_tiles), and computes P. One branch, and not two loops, since O, P and the
    // pipelines go from one work tile to the next within the same loop.
    __device__ __forceinline__ void make_p(Fragment& P_made, bool new_tile) {
        launder(S[0]);
//% if scatters
        smem.k_pipeline.consumer_release(k_state.stage, lane_index() == 0);
//% else
        smem.k_pipeline.consumer_release(k_state.stage, elected);
//% endif
        k_state.advance();
//% if maps and not folds
        map_scores(S, position(), chain);
//% elif scatters and folds
        const bool small = map_unless_small(S[0], small_unit(chain), chain);
//% endif
//% if adds and not linear
        RowOffset offset[1][2] = {};
//% if fetches
        const Work work = Work::load(current);  // a chain of its own: what it knows of tensors would take registers all the time
        Chain own = of_packed_heads<kPackGqa>(work.chain(p), work.batch, work.first_head);
        set_fetched(own, fetched);
        add_terms(S, offset, position(), own);
        if (k_block > lowest_block) fetched = fetch_block<Position, kBlockKv>(own, smem, first_query * kPackGqa, warp_row(), k_block - 1);
//% else
        add_terms(S, offset, position(), chain);
//% endif
//% endif
//% if scatters
        const bool needs_row_max = !softmax.rows_begun;  // were a row to need one later, sums of P would tell
        mask_scores(S, position(), own_blocks.needs_mask(k_block), seen.hides, chain);
        if (seen.is_last) release_q();
//% else
        const bool masked = own_blocks.needs_mask(k_block);
//% if not folds
        // A block that hides first keys alone, those at the left end of a window, is no row's first one; were it, softmax would find out.
        const bool needs_row_max = masked && (!Chain::kHidesFirstKeys || k_block >= own_blocks.full_end);
        if (masked) mask_scores<kPackGqa>(S, first_query * kPackGqa + warp_row(), k_block * kBlockKv, chain);
//% endif
        if (k_block == lowest_block) release_q();
//% endif
//% if folds
//% if scatters
        bool updates = softmax.updates(new_tile || needs_row_max);
        while (!softmax.exp2_and_sum(P_made, S[0], updates, small, chain)) {}
//% else
        float partial[2][2], by = small_unit(chain);
        softmax.needs_rescale = false;
#pragma unroll 1
        for (bool guessed = !softmax.updates(masked), small = guessed;; by = 1.0f) {  // most blocks do the first line alone
            if (small && softmax.exponentiate_small(P_made, partial, S[0], by, guessed, chain)) break;
            guessed = false, small = map_unless_small(S[0], by, chain);  // once: a block that is not guessed about is not computed again
            int first_key = k_block * kBlockKv;  // laundered: else columns would be found before the loop, and kept
            if (launder(first_key); masked) mask_scores<kPackGqa>(S, first_query * kPackGqa + warp_row(), first_key, chain);
            softmax.update_row_max_if_any(S[0], small, chain);
            if (!small) { softmax.template exponentiate<false>(P_made, partial, S[0], chain); break; }
        }
        softmax.add_to_sums(partial);
//% endif
//% elif linear
        softmax.exp2_and_sum(P_made, S[0], new_tile || needs_row_max, BlockTerms{terms, *this, k_block});
//% elif adds
        softmax.exp2_and_sum(P_made, S[0], new_tile || needs_row_max, offset[0]);
//% else
        softmax.exp2_and_sum(P_made, S[0], new_tile || needs_row_max);
//% endif
//% if drops
        drop<kPackGqa>(P_made, dropout, first_query * kPackGqa + warp_row(), k_block * kBlockKv);
//% endif
    }
//% if changes or scatters
    using Position = ScorePosition<false, kPackGqa>;
    __device__ __forceinline__ Position position() const { return {first_query * kPackGqa + warp_row(), k_block * kBlockKv}; }
//% if linear
    // The chain once more, with what it knows of heads: that would take registers all the time.
    __device__ __forceinline__ Chain chain_of_heads() const {
        const Work work = Work::load(current);
        return of_packed_heads<kPackGqa>(work.chain(p), work.batch, work.first_head);
    }
//% endif
//% endif
    // Every warp releases Q for itself. Once Q of work tile t is released, the producer may write tile t + kQueryStages into
    // the slot of tile t - 2, which this warp has read for the last time: it has stored the O of tile t - 2.
    __device__ __forceinline__ void release_q() {
        barrier_warp_sync();
        smem.q_pipeline.consumer_release(q_state.stage, lane_index() == 0);
        q_state.advance();
    }
    // The P V before has completed: releases its V stage, and stores O if that was the tile's last one, else rescales it if need be.
    // Storing delays the other consumer's turn; the Q K^T just issued runs meanwhile.
    __device__ __forceinline__ void retire_pv() {
        launder(O);
        if (v_stage_in_use >= 0) smem.v_pipeline.consumer_release(v_stage_in_use, elected);
        if (store_pending) {
            const Work work = Work::load(finished);
            const int row = warp_row();
            const SharedAddress panels = smem.out + row / 16 * ForwardStorage<Traits>::kOutBytes;
            store_output<Element, Traits::kOutPanels, Traits::kPingPong>(p.out_map, O, normalisers, panels, work.coordinate1(row),
                                                                         work.coordinate2(row), work.coordinate3());
//% if overwrites
            store_pending = accumulate = false;  // the new work tile's first P V writes O
//% else
            store_pending = false;
//% endif
        } else if (softmax.needs_rescale) {
            softmax.rescale(O);
        }
    }

    // ---- from one work tile to the next ----

    // From here until the next retire_pv, O, the last P V, normalisers and `finished` are the old work tile's; all else is the new one's.
    __device__ __forceinline__ void change_tile() { finish_tile(), begin_tile(); }
    // Waits for the next work tile's Q. Returns false at the end of the work.
    __device__ __forceinline__ bool wait_for_work() const {
        smem.q_pipeline.consumer_wait(q_state);
        return shfl_sync_first(Work::load(smem.work_slot(slot.stage)).end_block) > 0;
    }
    __device__ __forceinline__ void begin_tile() {
        current = smem.work_slot(slot.stage);
        slot.advance();
        const Work work = Work::load(current);
        first_query = work.first_query;
//% if not scatters
        k_block = shfl_sync_first(work.end_block) - 1;
        lowest_block = work.lowest_block(p);
//% endif
//% if heads and not linear
        chain = of_packed_heads<kPackGqa>(work.chain(p), work.batch, work.first_head);
//% else
        chain = work.chain(p);
//% endif
//% if linear
        terms.begin(chain_of_heads(), Position{first_query * kPackGqa + warp_row(), 0}, softmax.scale_log2);
//% endif
//% if drops
        dropout = Dropout::of(p, work.batch, work.first_head);
//% endif
        own_blocks = chain.template key_tiles<kOwnQueries, kBlockKv>(first_query + consumer * kOwnQueries);
//% if fetches
        fetched = fetch_block<Position, kBlockKv>(chain, smem, first_query * kPackGqa, warp_row(), k_block);
//% endif
//% if folds and not scatters
        softmax.restart(own_blocks.full_begin < own_blocks.full_end, chain);
//% else
        softmax.restart();
//% endif
    }
    __device__ __forceinline__ void finish_tile() {
//% if joins
        const int row = lane_index() / 4, head = Work::load(current).first_head;
        const float of_rows[2] = {p.sinks[head + row % kPackGqa], p.sinks[head + (row + 8) % kPackGqa]};
        const PairStatistics statistics = softmax.finish(normalisers, of_rows, p.sinks_unit, p.ln2_lo);
//% else
//% if linear
        const PairStatistics statistics = softmax.finish(normalisers, terms);
//% else
        const PairStatistics statistics = softmax.finish(normalisers);
//% endif
//% endif
//% if drops
        normalisers[0] *= p.dropout_scale, normalisers[1] *= p.dropout_scale;
//% endif
        if (p.lse != nullptr) hand_statistics_over(statistics);
        finished = current;
        store_pending = true;
    }
    __device__ __forceinline__ void hand_statistics_over(const PairStatistics& statistics) {
        const Pipeline<1> pipeline = smem.statistics_pipeline(consumer);
        pipeline.producer_acquire(statistics_state);
        statistics.store(smem.statistics_of(consumer));
        barrier_warp_sync();
        pipeline.producer_commit(statistics_state.stage, lane_index() == 0);
        statistics_state.advance();
    }
    // This warp's first row within a tile: 16 for each warp before it, the producer's 4 aside. It is computed anew at each use, because
    // keeping it would cost a register.
    __device__ __forceinline__ static int warp_row() {
        int thread = thread_index();
        launder(thread);
        return thread / 32 * 16 - 64;
    }
};
