// What the roles of the warp-specialised forward kernel share: the work tiles of a thread block, and its shared memory.

// A Q tile and its K blocks, [lowest_block(), end_block); a K block is what the mask calls a key tile. end_block >= 1 even if every key is
// masked, so that the epilogue runs; end_block == 0 marks the end of the work. Row r of the tile is query first_query + r / kPackGqa of
// head first_head + r % kPackGqa.
template <class Traits>
struct WorkTileInfo {
//% if packed
    static constexpr int kBytes = 32, kPackGqa = Traits::kPackGqa;
    int first_query, first_head, batch, end_block;
    SequenceRows rows;  // of its sequence, which counts as an entry of the batch

//% elif cached
    static constexpr int kBytes = 32, kPackGqa = Traits::kPackGqa;
    int first_query, first_head, batch, end_block;
    TiledSpan keys;  // of its sequence
    int unused = 0;

//% elif far
    static constexpr int kBytes = 32, kPackGqa = Traits::kPackGqa;
    int first_query, first_head, batch, end_block;
    int lowest;  // the first of its K blocks that counts
    int unused[3] = {};

//% else
    static constexpr int kBytes = 16, kPackGqa = Traits::kPackGqa;
    int first_query, first_head, batch, end_block;

//% endif
//% if packed
    // Begins to copy what is listed of a work tile; returns its head.
    template <class Parameters>
    __device__ __forceinline__ static int fetch(const Parameters& p, int index, SharedAddress to) {
        const WorkList list = WorkList::of(p);
        const WorkTile work = find_work_tile(index, list.scheduler(p), p.head_sets, p.head_sets_reciprocal);
        list.fetch_tile(work.tile, to);
        return work.head;
    }
    // Once the copy has been waited for.
    template <class Parameters>
    __device__ __forceinline__ static WorkTileInfo fetched(const Parameters& p, SharedAddress from, int head) {
        const PackedTile tile = PackedTile::of(load_shared_v4(from), load_shared_v4(from + 16));
        WorkTileInfo info{tile.first_row, head, tile.batch, 0, tile.rows};
//% if scatters
        const int end = info.blocks(p).end, last = seen(p, from, head).before(end);
        info.end_block = last < 0 ? max(end, 1) : last + 1;
//% else
        info.end_block = max(info.blocks(p).end, 1);
//% endif
        return info;
    }
//% if scatters
    // The same; which of its K blocks are visited: end_block - 1 is the last one, even if none is seen.
    template <class Parameters>
    __device__ __forceinline__ static SeenTiles seen(const Parameters& p, SharedAddress from, int head) {
        return SeenTiles::of(p, 0, head, load_shared(from + 8));  // from the last to the first: how many there are nobody asks
    }
//% endif
//% else
    template <class Parameters>
    __device__ __forceinline__ static WorkTileInfo find(const Parameters& p, int index) {
//% if tensors
        // A head of all entries of the batch, and then the next one: they may share what each score has in memory.
        const WorkTile turned = find_work_tile(index, TileScheduler::of(p, p.query_tiles), p.batches, p.batches_reciprocal);
        const WorkTile work{turned.tile, turned.batch, turned.head};
//% else
        const WorkTile work = find_work_tile(index, TileScheduler::of(p, p.query_tiles), p.head_sets, p.head_sets_reciprocal);
//% endif
//% if cached
        WorkTileInfo info{work.tile * Traits::kQueries, work.head * kPackGqa, work.batch, 0, TiledSpan::of(p, work.batch)};
//% elif scatters
        // Of the tiles of a head the last one is handed out first: the one with most K blocks, where tiles are in order of that.
        const i64 row = static_cast<i64>(work.batch) * p.seen_batch + work.head * p.seen_head + work.tile;
        const int tile = p.tile_order == nullptr ? work.tile : static_cast<int>(p.tile_order[row]);
        WorkTileInfo info{tile * Traits::kQueries, work.head * kPackGqa, work.batch, 0};
//% else
        WorkTileInfo info{work.tile * Traits::kQueries, work.head * kPackGqa, work.batch, 0};
//% endif
//% if scatters
        const int end = info.blocks(p).end, last = info.seen(p).before(end);
        info.end_block = last < 0 ? max(end, 1) : last + 1;
//% else
        info.end_block = max(info.blocks(p).end, 1);
//% endif
//% if far
        const i64 row = (static_cast<i64>(work.batch) * p.head_sets + work.head) * p.query_tiles + work.tile;
        info.lowest = p.first_keys == nullptr ? 0 : min(p.first_keys[row] / Traits::kBlockKv, info.end_block - 1);
//% endif
        return info;
    }
//% endif
//% if packed
    template <class Parameters>
    __device__ __forceinline__ PackedSequences sequences(const Parameters& p) const { return {rows, p.tokens_q}; }
//% endif
    template <class Parameters>
    __device__ __forceinline__ auto chain(const Parameters& p) const {
//% if packed
        const auto sequences = this->sequences(p);
//% elif not cached
        const auto sequences = Traits::sequences(p);
//% endif
//% if cached and links
        return with_first_keys(Traits::make_chain(p, p.len_q, keys.end), keys);
//% elif cached
        return with_first_keys(make_chain<Traits::kCausal>(p.len_q, keys.end), keys);
//% elif opens
        return of_batch(Traits::make_chain(p, sequences.len_q(batch), sequences.len_kv(batch)), batch);
//% elif links
        return Traits::make_chain(p, sequences.len_q(batch), sequences.len_kv(batch));
//% else
        return make_chain<Traits::kCausal>(sequences.len_q(batch), sequences.len_kv(batch));
//% endif
    }
    // K blocks that the tile's queries see.
    template <class Parameters>
    __device__ __forceinline__ auto blocks(const Parameters& p) const {
        return chain(p).template key_tiles<Traits::kQueries, Traits::kBlockKv>(first_query);
    }
//% if scatters and not packed
    // Which of them are visited: end_block - 1 is the last one, even if none is seen.
    template <class Parameters>
    __device__ __forceinline__ SeenTiles seen(const Parameters& p) const {
        return SeenTiles::of(p, batch, first_head, first_query / Traits::kQueries);
    }
//% elif not scatters
    // K blocks are visited from end_block - 1 down to this one.
    template <class Parameters>
    __device__ __forceinline__ int lowest_block(const Parameters& p) const {
//% if far
        return lowest;
//% else
        if constexpr (!decltype(chain(p))::kHidesFirstKeys) return 0;
        return min(blocks(p).begin, end_block - 1);
//% endif
    }
//% endif
//% if packed
    // Coordinates 1, 2 and 3 of a row in the tensor maps of Q and O.
    __device__ __forceinline__ int coordinate1(int row = 0) const { return rows.query_coordinate(first_query + row); }
    __device__ __forceinline__ int coordinate2(int = 0) const { return first_head; }
    __device__ __forceinline__ int coordinate3() const { return rows.end_q(); }

    __device__ __forceinline__ static WorkTileInfo load(SharedAddress slot) {
        const uint4 v = load_shared_v4(slot), of_rows = load_shared_v4(slot + 16);
        return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), static_cast<int>(v.w), SequenceRows::of(of_rows)};
    }
//% else
    // Coordinates 1, 2 and 3 of a row in the tensor maps of Q and O, where the column is coordinate 0: (query, head), or under PackGQA
    // (head, query) where kPackGqa divides the row: it divides a warp's first one, as it divides 16.
    static_assert(16 % kPackGqa == 0, "a warp's rows are whole queries");
    __device__ __forceinline__ int coordinate1(int row = 0) const { return kPackGqa == 1 ? first_query + row : first_head; }
    __device__ __forceinline__ int coordinate2(int row = 0) const { return kPackGqa == 1 ? first_head : first_query + row / kPackGqa; }
    __device__ __forceinline__ int coordinate3() const { return batch; }

    __device__ __forceinline__ static WorkTileInfo load(SharedAddress slot) {
        const uint4 v = load_shared_v4(slot);
//% if cached
        const TiledSpan keys = TiledSpan::of(load_shared_v4(slot + 16));
        return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), static_cast<int>(v.w), keys};
//% elif far
        const int lowest = static_cast<int>(load_shared(slot + 16));
        return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), static_cast<int>(v.w), lowest};
//% else
        return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), static_cast<int>(v.w)};
//% endif
    }
//% endif
    __device__ __forceinline__ void store(SharedAddress slot) const {
        store_shared_v4(slot, {static_cast<u32>(first_query), static_cast<u32>(first_head), static_cast<u32>(batch),
                               static_cast<u32>(end_block)});
//% if packed
        store_shared_v4(slot + 16, rows.vector());
//% elif cached
        store_shared_v4(slot + 16, keys.vector());
//% elif far
        store_shared(slot + 16, static_cast<u32>(lowest));
//% endif
    }
};

//% if scatters
// A consumer's way over the K blocks of a work tile that are seen, from the last to the first. Which block comes next the producer finds,
// and tells it in a word beside the block.
struct SeenBlocks {
    bool is_last, hides;  // of the work tile; whether something of it is hidden

    __device__ __forceinline__ static u32 word(int block, bool is_last, bool hides) { return block * 4 + hides * 2 + is_last; }
    // Returns the block.
    __device__ __forceinline__ int read(SharedAddress word) {
        const u32 found = shfl_sync_first(load_shared(word));
        barrier_warp_sync();  // before a lane releases the block, for the others too
        is_last = found & 1, hides = found & 2;
        return found / 4;
    }
};

//% endif
//% if packed
// Work tiles of the launch: as many as are listed, for each head.
template <class Parameters>
__device__ __forceinline__ int work_tiles(const Parameters& p) { return WorkList::of(p).tiles * p.head_sets; }

//% endif
// The persistent tile scheduler: which work tile this thread block takes after `index`. Its first tile is that of its own index. For each
// tile that it loads it makes one claim, late, so that blocks that run ahead take more tiles: `tiles` claims in all. Claim n, from 0,
// gets tile launched_blocks + n, and the last launched_blocks claims find none. Whoever makes claim `tiles` - 1 resets the counter.
template <class Traits, class Parameters>
__device__ __forceinline__ int next_work_tile(const Parameters& p, int index) {
//% if scatters and not packed
    return static_cast<int>(atom_inc_relaxed_gpu(p.tile_counter, p.tiles - 1)) + p.launched_blocks;
//% else
    if (!Traits::kDynamic) return index + p.launched_blocks;
    // A claim publishes nothing else, so relaxed order would do, but atoms/ptx has no relaxed addition.
//% if packed
    const int earlier_claims = static_cast<int>(atom_add_acq_rel_gpu(WorkList::claims(p), 1));  // of a list made for this launch
//% else
    const int earlier_claims = static_cast<int>(atom_add_acq_rel_gpu(p.tile_counter, 1));
    if (earlier_claims == p.tiles - 1) st_release_gpu(p.tile_counter, 0);  // the next launch begins at 0
//% endif
    return earlier_claims + p.launched_blocks;
//% endif
}

// Slots for WorkTileInfo. When a consumer releases Q of work tile t, these are in use: the slots of the kQueryStages tiles after t, whose Q
// is loaded or will be; that of t; and that of t - 1, whose O is not stored yet (see ForwardConsumer::release_q). An LSE writer has read
// the slot of t - 2: the consumer waited for that before it handed over the statistics of t - 1.
template <class Traits>
constexpr int kWorkSlots = Traits::kQueryStages + 2;

// Shared memory: tiles, pipelines and slots for WorkTileInfo. A row's softmax statistics are 8 bytes, handed from consumers to LSE writers.
template <class Traits>
struct ForwardStorage {
    using QueryTile = typename Traits::QueryTile;
    using KeyTile = typename Traits::KeyTile;
    using ValueTile = typename Traits::ValueTile;
    static constexpr int kStages = Traits::kStages, kQueryStages = Traits::kQueryStages, kConsumers = Traits::kConsumers;
    static constexpr int kOutBytes = Traits::kOutPanels * PanelTile<16, 64>::kBytes;  // for each consumer warp
    static constexpr int kStatisticsBytes = 64 * 8;                                  // for each consumer
    static_assert(sizeof(PairStatistics) * 32 == kStatisticsBytes, "32 pairs of rows");
    static_assert(sizeof(WorkTileInfo<Traits>) == WorkTileInfo<Traits>::kBytes, "stored as one vector");

    SharedAddress q_tiles, k_tiles, v_tiles, out, statistics;
//% if fetches
    static constexpr int kFetchedBytes = fetched_bytes<false>(Traits::kBlockKv);  // for each consumer warp
    SharedAddress fetched;
//% endif
    Pipeline<kQueryStages> q_pipeline;
    Pipeline<kStages> k_pipeline, v_pipeline;
    SharedAddress statistics_barriers;  // of a Pipeline<1> for each consumer, which fills it; its LSE writer empties it
//% if scatters
    SharedAddress block_words;  // what K blocks are: see SeenBlocks
//% endif
//% if packed
    SharedAddress found_work;  // the producer's next work tile, of which nobody else knows yet
    SharedAddress due_value;   // where the V lies that the producer loads next: its row, head and end
//% elif cached
    SharedAddress found_work;  // the producer's next work tile, of which nobody else knows yet
    Pipeline<1> landing;       // of V with rows that the producer zeroes before it commits the stage
//% endif
    SharedAddress work_slots;

    // All threads call this: each computes the addresses. One thread initialises the pipelines, for all after the next barrier.
    __device__ __forceinline__ explicit ForwardStorage(SharedRegions& regions) {
        q_tiles = regions.take(kQueryStages * QueryTile::kBytes);
        k_tiles = regions.take(kStages * KeyTile::kBytes);
        v_tiles = regions.take(kStages * ValueTile::kBytes);
        out = regions.take(kConsumers * 4 * kOutBytes);
//% if fetches
        fetched = regions.take(kConsumers * 4 * kFetchedBytes);
//% endif
        statistics = regions.take(kConsumers * kStatisticsBytes);
        q_pipeline.barriers = regions.take(Pipeline<kQueryStages>::kBytes);
        k_pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
        v_pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
        statistics_barriers = regions.take(kConsumers * Pipeline<1>::kBytes);
        work_slots = regions.take(kWorkSlots<Traits> * WorkTileInfo<Traits>::kBytes);
//% if packed
        found_work = regions.take(WorkTileInfo<Traits>::kBytes);
        due_value = regions.take(16);
//% elif cached
        found_work = regions.take(WorkTileInfo<Traits>::kBytes);
        landing.barriers = regions.take(Pipeline<1>::kBytes);
//% endif
//% if scatters
        block_words = regions.take(kStages * 4);
//% endif
    }
    __device__ __forceinline__ void initialise() const {
        // Each warp of a consumer releases Q, since its lanes also read the work slot. Only products read K and V, and they complete for
        // the whole warpgroup: one thread of a consumer releases them, as in CUTLASS's PipelineTmaAsync. Each warp commits its rows'
        // statistics.
//% if cached
        q_pipeline.initialise(1, kConsumers * 4 + 1);  // here the warp that loads V reads it, too
//% else
        q_pipeline.initialise(1, kConsumers * 4);
//% endif
//% if scatters
        k_pipeline.initialise(1, kConsumers * 4);  // here each warp reads a word beside K
//% else
        k_pipeline.initialise(1, kConsumers);
//% endif
        v_pipeline.initialise(1, kConsumers);
//% if cached
        landing.initialise(1, 1);
//% endif
        for (int i = 0; i < kConsumers; ++i) statistics_pipeline(i).initialise(4, 1);
        fence_mbarrier_init();
    }
    __device__ __forceinline__ Pipeline<1> statistics_pipeline(int consumer) const {
        return {statistics_barriers + consumer * Pipeline<1>::kBytes};
    }
    __device__ __forceinline__ SharedAddress statistics_of(int consumer) const { return statistics + consumer * kStatisticsBytes; }
//% if fetches
    __device__ __forceinline__ SharedAddress fetched_by(int consumer_warp) const { return fetched + consumer_warp * kFetchedBytes; }
//% endif
    __device__ __forceinline__ SharedAddress work_slot(u32 slot) const { return work_slots + slot * WorkTileInfo<Traits>::kBytes; }
//% if scatters
    __device__ __forceinline__ SharedAddress block_word(u32 stage) const { return block_words + stage * 4; }
//% endif
    __device__ __forceinline__ QueryTile query_tile(u32 stage) const { return {q_tiles + stage * QueryTile::kBytes}; }
    __device__ __forceinline__ KeyTile key_tile(u32 stage) const { return {k_tiles + stage * KeyTile::kBytes}; }
    __device__ __forceinline__ ValueTile value_tile(u32 stage) const { return {v_tiles + stage * ValueTile::kBytes}; }
};
