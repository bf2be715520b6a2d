// A mask in memory of the last keys, as many as there are queries, as a link of the chain: a score becomes -inf where its element is false.
// Tiles of earlier keys, which are nearly all, ask nothing of memory.

struct TreeMask : HidesNothing<TreeMask>, ScoreTensor<unsigned char> {
    static constexpr bool kAddsToScores = true, kHasHeads = true;
    int first_key;  // that it says something of

    template <class Parameters>
    __device__ __forceinline__ static TreeMask of(const Parameters& p, int len_q, int len_kv) {
        return {{},
                {p.tree_mask, p.tree_mask_batch, p.tree_mask_head, p.tree_mask_query, p.tree_mask_key, len_q, len_q, {}},
                len_kv - len_q};
    }
    template <class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ void add(float (&S)[kRowTiles][kTiles][4], RowOffset (&)[kRowTiles][2], const Position& position) const {
        if (position.first_column + kTiles * 8 <= first_key) return;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const unsigned char* own = of_row[h] + static_cast<i64>(min(position.row(i, h), len_q - 1)) * query_step;
#pragma unroll
                for (int j = 0; j < kTiles; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int column = position.first_column + lane_index() % 4 * 2 + j * 8 + e - first_key;
                        if (column >= 0 && column < len_kv && !own[static_cast<i64>(column) * key_step]) S[i][j][h * 2 + e] = -infinity();
                    }
            }
    }
};
