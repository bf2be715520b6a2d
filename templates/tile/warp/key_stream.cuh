// Brings the keys and values of a block's share to shared memory, tile by tile and across the borders of work items, so that copies are
// under way while a block ends an item and begins the next one.

// Key group g of a block reads keys [g * kGroupKv, (g + 1) * kGroupKv) of each tile, and its kThreads threads copy just these: so no other
// warps need to know when they have landed. Keys behind the last one are not read, and the tiles hold zeros there: for V that matters, as
// 0 * NaN is NaN.
template <class KeyTile, class ValueTile, int kBlockKv, int kThreads, int kHeadDim, int kHeadDimV, class Element, class Items>
struct KeyStream {
    static constexpr int kGroupKv = KeyTile::kRowCount;
    const Items& items;  // finds the visible part of a work item's keys, and their rows
//% if invariant
    KeySplit<DenseKeyTiles> part;  // the one that comes next
//% else
    KeyPart<DenseKeyTiles> part;  // the one that comes next
//% endif
    int tile, end;                // of the part that is under way: the item's tile that comes next, and where the visible ones end
    int first_key, len_kv, key_group, thread;  // first_key: the group's first key of the tile that comes next
    const Element *k, *v;  // what this thread copies first of it

//% if invariant
    __device__ __forceinline__ KeyStream(const Items& items, const KeySplit<DenseKeyTiles>& first, int key_group)
//% else
    __device__ __forceinline__ KeyStream(const Items& items, const KeyPart<DenseKeyTiles>& first, int key_group)
//% endif
        : items(items), part(first), tile(0), end(0), first_key(0), len_kv(0), key_group(key_group), thread(thread_index() % kThreads),
          k(nullptr), v(nullptr) {}

    // Starts the copies of the next tile and closes their group, which is empty where no tile is left. A slot holds a group's keys and its
    // values.
    __device__ __forceinline__ void load_next(SharedAddress slot) {
        while (tile >= end && part.exists()) begin_part();
        if (tile < end) {
            const int keys = len_kv - first_key;
            copy<kHeadDim>(KeyTile{slot}, k, items.p.k_row, keys);
            copy<kHeadDimV>(ValueTile{slot + KeyTile::kBytes}, v, items.p.v_row, keys);
            ++tile, first_key += kBlockKv;
        }
        cp_async_commit_group();
    }

  private:
    __device__ __forceinline__ void begin_part() {
        const auto work = items.work(part);
        tile = work.begin, end = work.end, len_kv = work.len_kv, first_key = tile * kBlockKv + key_group * kGroupKv;
        part.advance(items.shares);
        const CopyPartition<kThreads, KeyTile> of_keys(thread);
        const CopyPartition<kThreads, ValueTile> of_values(thread);
        k = items.key_row(work, first_key + of_keys.row) + of_keys.chunk * 8;
        v = items.value_row(work, first_key + of_values.row) + of_values.chunk * 8;
    }

    template <int kColumnsValid, class Tile>
    __device__ __forceinline__ void copy(const Tile& tile, const Element*& from, i64 row_stride, int rows_valid) {
        const CopyPartition<kThreads, Tile> partition(thread);
#pragma unroll
        for (int pass = 0; pass < partition.kPasses; ++pass) {
            const int row = pass * partition.kRowsPerPass + partition.row;
#pragma unroll
            for (int group = 0; group < partition.kGroups; ++group)
                if (partition.has_row(pass))
                    cp_async_16(partition.address(tile, pass, group), from + group * partition.kLanes * 8,
                                row < rows_valid && partition.has_column(group, kColumnsValid));
            from += partition.kRowsPerPass * row_stride;
            launder(from);  // or the compiler would keep the addresses of all passes in registers of their own
        }
        from += (kBlockKv - partition.kPasses * partition.kRowsPerPass) * row_stride;
    }
};
