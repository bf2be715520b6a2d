// Brings the keys and values of a block's share to shared memory as KeyStream does, where they lie in pages that a table names. Copies that
// looked into the table themselves would wait for memory twice. So what they need to know of a tile is there before its turn: its entries
// of the table are fetched while the tile that comes a ring of stages before is copied, and become addresses while the one before is.

// What copies need to know of a key group's kRows keys of a tile: where the rows of each in K and V are, then how many keys there are, at
// most 0 where the sequence ends before, and kNoTile where there is no tile at all; and their head. Where a row will be, there is at first
// the entry of its page and its row in the page.
template <int kRows>
struct KeyEntries {
    static constexpr int kBytes = kRows * 16 + 16, kNoTile = -1;
    SharedAddress base;

    __device__ __forceinline__ SharedAddress rows(int row) const { return base + row * 16; }
    __device__ __forceinline__ SharedAddress entry(int row) const { return rows(row); }
    __device__ __forceinline__ SharedAddress row_of_page(int row) const { return rows(row) + 4; }
    __device__ __forceinline__ SharedAddress of_all() const { return rows(kRows); }
};

// The same division of work as in KeyStream: kThreads threads of key group g copy keys [g * kGroupKv, (g + 1) * kGroupKv) of each tile, and
// look up just these. Keys behind the last one are not read, and the tiles hold zeros there: 0 * NaN is NaN.
template <class KeyTile, class ValueTile, int kBlockKv, int kStages, int kThreads, int kHeadDim, int kHeadDimV, class Element, class Items>
struct CachedKeyStream {
    static constexpr int kGroupKv = KeyTile::kRowCount, kEntries = kStages + 1;
    using Part = typename Items::Part;
    using Entries = KeyEntries<kGroupKv>;
    static constexpr int kBytes = kEntries * Entries::kBytes;  // of shared memory, for each key group

    const Items& items;  // finds the visible part of a work item's keys, and their rows
    Part part;           // whose keys are looked up
    int tiles;           // of it that are not yet
    int position, keys;  // the group's first key of the next one; keys of the sequence from there on, 0 or less where it ends before
    SharedAddress memory;  // of all key groups
    int next;              // number of the entries of the tile that is copied next

    __device__ __forceinline__ CachedKeyStream(const Items& items, const Part& first, SharedAddress memory)
        : items(items), part(first), tiles(0), position(0), keys(0), memory(memory), next(0) {}

    // Starts the copies of the first tiles, into all slots but the last one.
    template <int kSlotDistance>
    __device__ __forceinline__ void begin(SharedAddress first_slot) {
        if (part.exists()) begin_part();
#pragma unroll 1
        for (int tile = 0; tile < kStages; ++tile) look_up_next(entries_of(tile));
        cp_async_commit_group();
        cp_async_wait_group<0>();
        group_barrier();  // how many keys there are is known
        find_rows(entries_of(0));
#pragma unroll
        for (int stage = 0; stage < kStages - 1; ++stage) {
            group_barrier();  // rows are here, and nobody reads the entries that the next ones replace
            load_next(first_slot + stage * kSlotDistance);
        }
    }
    // Starts the copies of the next tile, and of the entries of the one that comes kStages later, and closes their group. The caller has
    // waited for the group before the last kStages - 2, and then for the threads of the key group.
    __device__ __forceinline__ void load_next(SharedAddress slot) {
        const Entries known = entries_of(next);
        const uint4 of_all = load_shared_v4(known.of_all());
        const int keys = static_cast<int>(of_all.x), before = next == 0 ? kEntries - 1 : next - 1;
        if (keys >= kGroupKv)
            copy_tile<true>(slot, known, keys);
        else if (keys != Entries::kNoTile)
            copy_tile<false>(slot, known, keys);
        next = next == kEntries - 1 ? 0 : next + 1;
        find_rows(entries_of(next));
        look_up_next(entries_of(before));
        cp_async_commit_group();
    }

  private:
    // Computed anew where they are needed, as registers are few.
    __device__ __forceinline__ static int key_group() { return thread_index() / kThreads; }
    __device__ __forceinline__ static int thread() { return thread_index() % kThreads; }  // of the key group
    __device__ __forceinline__ void group_barrier() const {
        if constexpr (kThreads == 32)
            barrier_warp_sync();
        else
            bar_sync(1 + key_group(), kThreads);
    }
    __device__ __forceinline__ Entries entries_of(int number) const {
        return {memory + (key_group() * kEntries + number) * Entries::kBytes};
    }

    __device__ __forceinline__ void look_up_next(const Entries& to) {
        while (tiles <= 0 && part.exists()) {
            part.advance(items.shares);
            if (part.exists()) begin_part();
        }
        const bool exists = tiles > 0;
        const auto rows = items.rows(part.head);
        const u32 keys_there = exists ? max(keys, 0) : Entries::kNoTile, head = rows.head_kv;
        if (thread() == 0) store_shared_v4(to.of_all(), {keys_there, head, 0, 0});
        if (!exists) return;
        const CachedSequences& sequences = items.sequences;
#pragma unroll
        for (int first = 0; first < kGroupKv; first += kThreads) {
            const int row = first + thread();
            if (row >= min(kGroupKv, keys)) break;
            const PageRow at = sequences.page_row(position + row);
            if (sequences.table == nullptr)
                store_shared(to.entry(row), rows.batch);
            else
                cp_async_4(to.entry(row), sequences.entry(rows.batch, at));
            store_shared(to.row_of_page(row), at.row);
        }
        --tiles, position += kBlockKv, keys -= kBlockKv;
    }
    __device__ __forceinline__ void begin_part() {
        const auto work = items.work(part);
        const KeySpan span = items.sequences.span(work.rows.batch);
        tiles = work.end - work.begin;
        position = span.begin + work.begin * kBlockKv + key_group() * kGroupKv, keys = span.end - position;
    }

    // Puts rows in the place of the entries that this thread has looked up, which have come.
    __device__ __forceinline__ void find_rows(const Entries& of) const {
        const auto& p = items.p;
        const uint4 of_all = load_shared_v4(of.of_all());
        const int keys = static_cast<int>(of_all.x), head = static_cast<int>(of_all.y);
#pragma unroll
        for (int first = 0; first < kGroupKv; first += kThreads) {
            const int row = first + thread();
            if (row >= min(kGroupKv, keys)) break;
            const int entry = load_shared(of.entry(row)), row_of_page = load_shared(of.row_of_page(row));
            const u64 k = bits_of_row(items.sequences.key_row(p.k, {p.k_batch, p.k_head, p.k_row}, entry, head, row_of_page));
            const u64 v = bits_of_row(items.sequences.key_row(p.v, {p.v_batch, p.v_head, p.v_row}, entry, head, row_of_page));
            store_shared_v4(of.rows(row), {static_cast<u32>(k), static_cast<u32>(k >> 32), static_cast<u32>(v), static_cast<u32>(v >> 32)});
        }
    }
    __device__ __forceinline__ static u64 bits_of_row(const Element* row) { return reinterpret_cast<u64>(row); }
    __device__ __forceinline__ static const Element* row_of_bits(u32 low, u32 high) {
        return reinterpret_cast<const Element*>(u64{high} << 32 | low);
    }

    // kWhole: the tile has all of the group's keys.
    template <bool kWhole>
    __device__ __forceinline__ void copy_tile(SharedAddress slot, const Entries& known, int keys) const {
        if constexpr (kHeadDim == kHeadDimV) {
            copy<KeyTile, kHeadDim, true, true, kWhole>(slot, known, keys);
        } else {
            copy<KeyTile, kHeadDim, true, false, kWhole>(slot, known, keys);
            copy<ValueTile, kHeadDimV, false, true, kWhole>(slot, known, keys);
        }
    }
    // Copies a tile of K, one of V, or both where they are equally wide: a thread has the same rows of both then.
    template <class Tile, int kColumnsValid, bool kOfKeys, bool kOfValues, bool kWhole>
    __device__ __forceinline__ void copy(SharedAddress slot, const Entries& known, int keys) const {
        const CopyPartition<kThreads, Tile> partition(thread());
        constexpr int kPasses = partition.kPasses, kAtOnce = kPasses % 4 == 0 ? 4 : kPasses % 2 == 0 ? 2 : 1;
#pragma unroll
        for (int first = 0; first < kPasses; first += kAtOnce) {
            uint4 rows[kAtOnce] = {};  // are on their way together
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int row = (first + i) * partition.kRowsPerPass + partition.row;
                if (partition.has_row(first + i) && (kWhole || row < keys)) rows[i] = load_shared_v4(known.rows(row));
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const bool exists = kWhole || (first + i) * partition.kRowsPerPass + partition.row < keys;
                if (!partition.has_row(first + i)) continue;
                if constexpr (kOfKeys)
                    copy_row<kColumnsValid, kWhole>(Tile{slot}, first + i, row_of_bits(rows[i].x, rows[i].y), exists);
                if constexpr (kOfValues)
                    copy_row<kColumnsValid, kWhole>(Tile{slot + KeyTile::kBytes}, first + i, row_of_bits(rows[i].z, rows[i].w), exists);
            }
        }
    }
    // A thread's part of a row, which is not read unless it exists.
    template <int kColumnsValid, bool kWhole, class Tile>
    __device__ __forceinline__ void copy_row(const Tile& tile, int pass, const Element* row, bool exists) const {
        const CopyPartition<kThreads, Tile> partition(thread());
        const Element* from = row + partition.chunk * 8;
#pragma unroll
        for (int group = 0; group < partition.kGroups; ++group) {
            const SharedAddress to = partition.address(tile, pass, group);
            if (kWhole && (group + 1) * partition.kLanes * 8 <= kColumnsValid)
                cp_async_16(to, from + group * partition.kLanes * 8);
            else
                cp_async_16(to, from + group * partition.kLanes * 8, exists && partition.has_column(group, kColumnsValid));
        }
    }
};
