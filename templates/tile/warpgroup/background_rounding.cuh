// dQ = scale * d_q_sum, of heads whose sums are complete, while the consumers of this block compute other heads: here in place of a kernel
// after the main one. A thread loads the sums of a query tile part by part, a warp rounds them.
//
// p.d_q_progress counts: first the query tiles that blocks have claimed for this, then for each key/value head the work tiles whose dQ is
// added. Blocks claim query tiles in the order of the heads, in which L2 groups become complete, and wait for them.

//% if packed
template <class Element, class Gradient, class QueryTile, int kBlockQ, int kSumStages, int kBlockKv>
//% else
template <class Element, class Gradient, class QueryTile, int kBlockQ, int kSumStages>
//% endif
struct BackgroundRounding {
    using Ring = Pipeline<kSumStages>;
    static constexpr int kParts = Gradient::kWarps, kTiles = Gradient::kTiles;  // of a query tile; column tiles of a part
    static constexpr int kPartBytes = kTiles * 512, kRingBytes = kSumStages * kPartBytes;
    static constexpr int kRoundTiles = 2;  // at a time, as registers allow
//% if packed
    static constexpr int kNone = -1;  // in place of a head, where there is no tile any more
    // rounded_tile: dQ on its way out. tile_numbers: 16 bytes for each part of the ring, where in dQ its query tile goes.
//% else
    // rounded_tile: dQ on its way out. tile_numbers: of the query tile to which each part of the ring belongs.
//% endif
    SharedAddress rounded_tile, parts, tile_numbers;
    Ring ring;

    __device__ __forceinline__ explicit BackgroundRounding(SharedRegions& regions)
        : rounded_tile(regions.take(QueryTile::kBytes)), parts(regions.take(kRingBytes)) {}
    __device__ __forceinline__ void take_barriers(SharedRegions& regions) {
        ring.barriers = regions.take(Ring::kBytes);
//% if packed
        tile_numbers = regions.take(kSumStages * 16);
//% else
        tile_numbers = regions.take(kSumStages * 4);
//% endif
    }
    // By one thread.
    __device__ __forceinline__ void initialise() const { ring.initialise(1, 1); }

    // By one thread, once the dQ of a work tile is added: the barriers before this order additions of other threads before its release.
    template <class Parameters>
    __device__ __forceinline__ static void count(const Parameters& p, const KeyWork& work) {
        griddepcontrol_wait();  // for counters of zero
        atom_add_acq_rel_gpu(p.d_q_progress + 1 + work.batch * p.heads_kv + work.head_kv, 1);
    }

    // By one thread: claims query tiles, and loads them once their head is complete.
    template <class Parameters>
    __device__ __forceinline__ void load(const Parameters& p) const {
        griddepcontrol_wait();
        PipelineState<kSumStages> state;
//% if packed
        const WorkList list = WorkList::at(p.query_list);
//% endif
#pragma unroll 1
        while (true) {
//% if packed
            const int tile = static_cast<int>(atom_add_acq_rel_gpu(p.d_q_progress, 1));
            const bool exists = tile < list.tiles * p.heads_q;
            const float* part = p.d_q_sum;
            uint4 coordinates{0, static_cast<u32>(kNone), 0, 0};  // of its first row: row, head and end
            if (exists) {
                const ListedQueryTile<kBlockQ> listed = summed_tile(p, list, tile);
                const SequenceRows& rows = listed.sequences.rows;
                coordinates = {static_cast<u32>(rows.query_coordinate(listed.first_query)), static_cast<u32>(listed.head),
                               static_cast<u32>(rows.end_q()), 0};
                const u32* added = p.d_q_progress + 1 + listed.batch * p.heads_kv + divide(listed.head, p.group_reciprocal);
                const u32 key_tiles = KeyTiles<kBlockKv, true>::count(rows);
                part += listed.index * Gradient::kFloats;
                while (ld_acquire_gpu(added) != key_tiles) {}
                fence_proxy_async_global();
            }
//% else
//% if tensors
            const int claimed = static_cast<int>(atom_add_acq_rel_gpu(p.d_q_progress, 1));
            const bool exists = claimed < p.sum_tiles;
            const int tile = exists ? turned_tile(p, claimed) : claimed;
//% else
            const int tile = static_cast<int>(atom_add_acq_rel_gpu(p.d_q_progress, 1));
            const bool exists = tile < p.sum_tiles;
//% endif
            if (exists) {
                const int head = divide(tile, p.query_tiles_reciprocal), head_kv = divide(head, p.group_reciprocal);  // of the whole batch
                while (ld_acquire_gpu(p.d_q_progress + 1 + head_kv) != p.key_tiles) {}
                fence_proxy_async_global();
            }
            const float* part = p.d_q_sum + static_cast<i64>(tile) * Gradient::kFloats;
//% endif
#pragma unroll 1
            for (int i = 0; i < kParts; ++i, part += kPartBytes / 4) {
                ring.producer_acquire(state);
//% if packed
                store_shared_v4(tile_numbers + state.stage * 16, coordinates);
//% else
                store_shared(tile_numbers + state.stage * 4, static_cast<u32>(tile));
//% endif
                if (!exists) return ring.producer_commit(state.stage, true);
                ring.producer_expect(state, kPartBytes);
                cp_async_bulk_load(parts + state.stage * kPartBytes, part, kPartBytes, ring.full(state.stage));
                state.advance();
            }
        }
    }
    // By a warp: rounds what is loaded, and stores it.
    template <class Parameters>
    __device__ __forceinline__ void round(const Parameters& p) const {
        PipelineState<kSumStages> state;
#pragma unroll 1
        while (true) {
            ring.consumer_wait(state);
//% if packed
            const uint4 tile = load_shared_v4(tile_numbers + state.stage * 16);
            if (static_cast<int>(tile.y) == kNone) break;
//% else
            const int tile = static_cast<int>(load_shared(tile_numbers + state.stage * 4));
            if (tile >= p.sum_tiles) break;
//% endif
            if (elect_sync()) cp_async_bulk_wait_group_read<0>();
            barrier_warp_sync();
#pragma unroll 1
            for (int part = 0; part < kParts; ++part) {
                ring.consumer_wait(state);
                round_part(p.scale, part, parts + state.stage * kPartBytes + lane_index() * 16);
                barrier_warp_sync();
                ring.consumer_release(state.stage, elect_sync());
                state.advance();
            }
            fence_proxy_async();
            barrier_warp_sync();
            if (elect_sync()) store_rows(p, tile);
        }
        if (elect_sync()) cp_async_bulk_wait_group_read<0>();
    }

  private:
//% if packed
    // The tile of that number: L2 groups and sequences come in the order of work tiles.
    template <class Parameters>
    __device__ __forceinline__ static ListedQueryTile<kBlockQ> summed_tile(const Parameters& p, const WorkList& list, int number) {
        const TileScheduler scheduler{list.tiles, p.l2_group_queries, p.l2_group_queries * list.tiles, p.l2_group_queries_reciprocal,
                                  list.l2_group_tiles_reciprocal};
        const WorkTile found = find_work_tile(number, scheduler, p.heads_q, p.heads_q_reciprocal);
        return ListedQueryTile<kBlockQ>::at(p, found.tile, found.head);
    }
//% endif
//% if tensors
    // The tile of that number where a head of all entries of the batch comes before the next head, as work tiles do.
    template <class Parameters>
    __device__ __forceinline__ static int turned_tile(const Parameters& p, int number) {
        const int batch_and_head = divide(number, p.query_tiles_reciprocal), head = divide(batch_and_head, p.batches_reciprocal);
        const int batch = batch_and_head - head * p.batches;
        return number + (batch * p.heads_q + head - batch_and_head) * p.query_tiles;
    }
//% endif
    // `sums`: of this lane.
    __device__ __forceinline__ void round_part(float scale, int part, SharedAddress sums) const {
#pragma unroll 1
        for (int column_tile = 0; column_tile < kTiles; column_tile += kRoundTiles) {
            float dQ[kRoundTiles][4];
#pragma unroll
            for (int j = 0; j < kRoundTiles; ++j) {
                const uint4 v = load_shared_v4(sums + (column_tile + j) * 512);
                dQ[j][0] = __uint_as_float(v.x) * scale, dQ[j][1] = __uint_as_float(v.y) * scale;
                dQ[j][2] = __uint_as_float(v.z) * scale, dQ[j][3] = __uint_as_float(v.w) * scale;
            }
            u32 rounded[kRoundTiles / 2][4];
            round_to_operand<Element>(rounded, dQ);
            Gradient::store_rounded(QueryTile{rounded_tile}, part, column_tile, rounded);
        }
    }
//% if packed
    template <class Parameters>
    __device__ __forceinline__ void store_rows(const Parameters& p, const uint4& tile) const {
        const int row = static_cast<int>(tile.x), head = static_cast<int>(tile.y), end = static_cast<int>(tile.z);
//% else
    template <class Parameters>
    __device__ __forceinline__ void store_rows(const Parameters& p, int tile) const {
        const int head_and_batch = divide(tile, p.query_tiles_reciprocal), batch = divide(head_and_batch, p.heads_q_reciprocal);
        const int row = (tile - head_and_batch * p.query_tiles) * kBlockQ, head = head_and_batch - batch * p.heads_q;
//% endif
#pragma unroll
        for (int panel = 0; panel < QueryTile::kPanels; ++panel)
//% if packed
            cp_async_bulk_tensor_store_5d(p.d_q_map, rounded_tile + panel * QueryTile::kPanelBytes, panel * 64, row, head, end, kMapRows);
//% else
            cp_async_bulk_tensor_store(p.d_q_map, rounded_tile + panel * QueryTile::kPanelBytes, panel * 64, row, head, batch);
//% endif
        cp_async_bulk_commit_group();
    }
};
