// What the roles of the decode kernel share: a block's way through its keys, and its shared memory.

// The block's share of all key tiles, and a part of it. A head, to these, is a row tile of a key/value head: see PackedRows.
template <class Traits>
using Shares = KeyShares<typename Traits::KeyTiles>;
template <class Traits>
using Part = KeyPart<typename Traits::KeyTiles>;

//% if cached
template <class Traits, class Parameters>
__device__ __forceinline__ Shares<Traits> key_shares(const Parameters& p, const typename Traits::KeyTiles& key_tiles) {
    return {key_tiles, p.blocks, p.blocks_reciprocal};
}

//% else
template <class Traits, class Parameters>
__device__ __forceinline__ Shares<Traits> key_shares(const Parameters& p) {
    return {{p.key_tiles, p.heads, p.batch, p.key_tiles_reciprocal, p.batch_reciprocal}, p.blocks, p.blocks_reciprocal};
}

//% endif

// The rows that meet a key/value head of those whose tiles lie side by side in a stage.
template <class Traits, class Parameters>
__device__ __forceinline__ PackedRows rows_of(const Parameters& p, const HeadTiles& head, int tile_head = 0) {
    constexpr int kSideBySide = Traits::kKeyHeads;
    PackedRows rows = PackedRows::find(RowTiles::of(p), p.group * kSideBySide, head.batch, head.head);
    if constexpr (kSideBySide > 1) {
        rows.head_kv = rows.head_kv * kSideBySide + tile_head;
        rows.first_head += tile_head * p.group;
        rows.end_head = min(rows.head_kv * p.group + p.group, p.heads_q);  // the last head may have no neighbour
    }
    return rows;
}

//% if hides
// The first key tile that some of these rows see, from which on a head's tiles are counted. `front`: rows of tiles before the first key.
template <class Traits, class Parameters>
__device__ __forceinline__ int first_seen_tile(const Parameters& p, const PackedRows& rows, int len_kv, int front) {
    const int begin = Traits::make_chain(p, len_kv).keys(rows.first_query).begin;
    return (front + min(begin, max(len_kv - 1, 0))) / Traits::kBlockKv;
}

//% endif
// Shared memory: the rows of Q, stages of K and V of kKeyHeads neighbouring heads each, and what the second group of consumers hands to the
// first one.
template <class Traits>
struct DecodeStorage {
    using QueryTile = typename Traits::QueryTile;
    using KeyTile = typename Traits::KeyTile;
    using ValueTile = typename Traits::ValueTile;
    static constexpr int kQueryStages = Traits::kQueryStages, kStages = Traits::kStages;
    static constexpr int kKeyBytes = Traits::kKeyHeads * KeyTile::kBytes, kStageBytes = kKeyBytes + Traits::kKeyHeads * ValueTile::kBytes;
    // Column tiles of O that are handed over at a time: 16 bytes of each for every thread.
    static constexpr int kHandedTiles = Traits::kColumnsV / 8 < 16 ? Traits::kColumnsV / 8 : 16;
    static constexpr int kHandedBytes = Traits::kKeyGroups > 1 ? kHandedTiles * 128 * 16 : 0;
    static constexpr int kPartsBytes = Traits::kSharers * 2 * 16;
    static constexpr int kStatisticsBytes = Traits::kKeyGroups > 1 ? 64 * 8 : 0;

    SharedAddress q_tiles, stages, handed, statistics;
    Pipeline<kQueryStages> q_pipeline;
    Pipeline<kStages> pipeline;
//% if cached
    SharedAddress parts;  // for each sharer and its first and its last part: HeadParts, and whether it has written the last of them
    static constexpr int kBoxBatches = 4;  // each of as many boxes as a warp finds at a time: a lane's is KeyBox, 16 bytes
    Pipeline<kBoxBatches> box_pipeline;
    SharedAddress boxes;
    SharedAddress sums, scan;  // see CachedKeyTiles and BlockScan

//% else
    SharedAddress parts;  // for each sharer and its first and its last part: HeadParts, and whether it has written the last of them

//% endif
    // All threads call this: each computes the addresses.
    __device__ __forceinline__ explicit DecodeStorage(SharedRegions& regions) {
        q_tiles = regions.take(kQueryStages * Traits::kKeyHeads * QueryTile::kBytes);
        stages = regions.take(kStages * kStageBytes);
        handed = regions.take(kHandedBytes);
        statistics = regions.take(kStatisticsBytes);
        q_pipeline.barriers = regions.take(Pipeline<kQueryStages>::kBytes);
        pipeline.barriers = regions.take(Pipeline<kStages>::kBytes);
        parts = regions.take(kPartsBytes);
//% if cached
        box_pipeline.barriers = regions.take(Pipeline<kBoxBatches>::kBytes);
        boxes = regions.take(kBoxBatches * 32 * 16);
        scan = regions.take(Traits::Scan::kBytes);
        sums = regions.take(Traits::KeyTiles::kBytes);
//% endif
    }
    // All threads call this, too; what it does is there after the next barrier. The consumers zero the rows that Q does not have, which no
    // copy writes: the producers, for whom all wait, have nothing to do here.
    template <int kThreads>
    __device__ __forceinline__ void initialise(int q_rows) const {
        const int thread = thread_index() - 128;  // of the consumers
        if (thread < 0) return;
        if (thread == 0) {
            // Each warp releases Q: a consumer may have no tile of a part, and then nothing else keeps its warps together, of which one
            // that still waits for Q would miss its phase. One thread releases K and V, as products keep a consumer's warps together.
            q_pipeline.initialise(1, Traits::kConsumers * 4);
//% if cached
            pipeline.initialise(2, Traits::kSharers);
            box_pipeline.initialise(1, 2);
//% else
            pipeline.initialise(1, Traits::kSharers);
//% endif
            fence_mbarrier_init();
        }
        for (int panel = 0; panel < kQueryStages * Traits::kKeyHeads * QueryTile::kPanels; ++panel)
            for (int i = q_rows * 8 + thread; i < Traits::kRows * 8; i += kThreads - 128)
                store_shared_v4(q_tiles + panel * QueryTile::kPanelBytes + i * 16, {0, 0, 0, 0});
        fence_proxy_async();
    }
//% if cached
    __device__ __forceinline__ SharedAddress box(u32 batch, int lane) const { return boxes + (batch * 32 + lane) * 16; }
//% endif
    // Of the stage's key/value head `head`, as the next two.
    __device__ __forceinline__ QueryTile q_tile(u32 stage, int head) const {
        return {q_tiles + (stage * Traits::kKeyHeads + head) * QueryTile::kBytes};
    }
    __device__ __forceinline__ KeyTile key_tile(u32 stage, int head) const {
        return {stages + stage * kStageBytes + head * KeyTile::kBytes};
    }
    __device__ __forceinline__ ValueTile value_tile(u32 stage, int head) const {
        return {stages + stage * kStageBytes + kKeyBytes + head * ValueTile::kBytes};
    }
};
