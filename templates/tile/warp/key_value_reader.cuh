// Loads K and V for a block of the generic forward kernel, from the last tile to the first, into stages that hold a tile of K and one of V.

// A stage holds the values of a tile, and the keys one step before them: what the steps of the tile need, since S is computed one step
// ahead. A load is one group of copies, empty where there is no tile, so that the number of groups under way never depends on the data.
template <class KeyTile, class ValueTile, int kStepKv, int kThreads, int kHeadDim, int kHeadDimV, class Element>
struct KeyValueReader {
    static constexpr int kBlockKv = KeyTile::kRowCount;
    int tile;  // that was loaded last
    TileReader<KeyTile, kThreads, kHeadDim, Element> keys;
    TileReader<ValueTile, kThreads, kHeadDimV, Element> values;

    // `k` and `v` point at the first rows of the sequence; `last` is its last tile, or -1 if there is none.
    __device__ __forceinline__ KeyValueReader(const Element* k, i64 k_row, const Element* v, i64 v_row, int last)
        : tile(last), keys(k + (last * kBlockKv - kStepKv) * k_row, k_row), values(v + last * kBlockKv * v_row, v_row) {}

    // The last tile, which comes first and may end early. The caller commits the group.
    __device__ __forceinline__ void load_last(SharedAddress stage, int len_kv) {
        const int rows_valid = len_kv - tile * kBlockKv;
        keys.load(KeyTile{stage}, tile == 0 ? kStepKv : 0, rows_valid + kStepKv);
        values.load(ValueTile{stage + KeyTile::kBytes}, 0, rows_valid);
    }
    // The tile before, and its group. All others are whole; only the keys one step before the first tile do not exist.
    __device__ __forceinline__ void load_next(SharedAddress stage) {
        if (--tile > 0)
            keys.load(KeyTile{stage});
        else if (tile == 0 && kBlockKv > kStepKv)
            keys.template load<kStepKv>(KeyTile{stage});
        if (tile >= 0) values.load(ValueTile{stage + KeyTile::kBytes});
        cp_async_commit_group();
    }
};
