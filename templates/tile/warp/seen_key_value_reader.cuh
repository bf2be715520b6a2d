// Loads K and V for a block of the generic forward kernel where it visits some tiles alone, from the last to the first: see
// key_value_reader.cuh, where a tile is one step.

// A stage holds the values of a tile, and the keys of the one that is visited behind it. A load is one group of copies, empty where there
// is no tile.
template <class KeyTile, class ValueTile, int kThreads, int kHeadDim, int kHeadDimV, class Element>
struct SeenKeyValueReader {
    static constexpr int kBlockKv = KeyTile::kRowCount;
    const Element *k, *v;  // the first rows of the sequence
    i64 k_row, v_row;
    const SeenTiles& seen;
    int tile;  // whose values are loaded next; -1: none are left

    __device__ __forceinline__ SeenKeyValueReader(const Element* k, i64 k_row, const Element* v, i64 v_row, const SeenTiles& seen, int last)
        : k(k), v(v), k_row(k_row), v_row(v_row), seen(seen), tile(last) {}

    __device__ __forceinline__ void load_next(SharedAddress stage, int len_kv) {
        if (tile >= 0) {
            const int behind = seen.before(tile);
            if (behind >= 0)
                load_tile<kThreads>(KeyTile{stage}, k + behind * kBlockKv * k_row, k_row, len_kv - behind * kBlockKv, kHeadDim);
            const Element* values = v + tile * kBlockKv * v_row;
            load_tile<kThreads>(ValueTile{stage + KeyTile::kBytes}, values, v_row, len_kv - tile * kBlockKv, kHeadDimV);
            tile = behind;
        }
        cp_async_commit_group();
    }
};
