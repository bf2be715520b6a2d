// Loads K and V for a block of the generic forward kernel, from the last tile to the first, into stages that hold a tile of K and one of V.

// A stage holds the values of a tile, and the keys one step before them: what the steps of the tile need, since S is computed one step
// ahead. A load is one group of copies, empty where there is no tile, so that the number of groups under way never depends on the data.
template <class KeyTile, class ValueTile, int kStepKv, int kThreads, int kHeadDim, int kHeadDimV, class Element>
struct KeyValueReader {
    static constexpr int kBlockKv = KeyTile::kRowCount, kSteps = kBlockKv / kStepKv;
    int lowest, tile;  // the tile that is loaded at the end; the one that was loaded last
    TileReader<KeyTile, kThreads, kHeadDim, Element> keys;
    TileReader<ValueTile, kThreads, kHeadDimV, Element> values;

    // `k` and `v` point at the first rows of the sequence. `steps`: those that the block visits.
    template <class Steps>
    __device__ __forceinline__ KeyValueReader(const Element* k, i64 k_row, const Element* v, i64 v_row, const Steps& steps)
        : KeyValueReader(k, k_row, v, v_row, steps.begin / kSteps, steps.last() >= 0 ? steps.last() / kSteps : -1) {}

    // The last tile, which comes first and may end early. The caller commits the group.
    __device__ __forceinline__ void load_last(SharedAddress stage, int len_kv) {
        const int rows_valid = len_kv - tile * kBlockKv;
        keys.load(KeyTile{stage}, tile == 0 ? kStepKv : 0, rows_valid + kStepKv);
        values.load(ValueTile{stage + KeyTile::kBytes}, 0, rows_valid);
    }
    // The tile before, and its group. All others are whole; only the keys one step before tile 0 do not exist.
    __device__ __forceinline__ void load_next(SharedAddress stage) {
        if (--tile > 0 && tile >= lowest)
            keys.load(KeyTile{stage});
        else if (tile == 0 && tile >= lowest && kBlockKv > kStepKv)
            keys.template load<kStepKv>(KeyTile{stage});
        if (tile >= lowest) values.load(ValueTile{stage + KeyTile::kBytes});
        cp_async_commit_group();
    }

  private:
    __device__ __forceinline__ KeyValueReader(const Element* k, i64 k_row, const Element* v, i64 v_row, int lowest, int last)
        : lowest(lowest), tile(last), keys(k + (last * kBlockKv - kStepKv) * k_row, k_row), values(v + last * kBlockKv * v_row, v_row) {}
};
