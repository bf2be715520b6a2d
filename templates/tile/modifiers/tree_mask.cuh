// A mask in memory of the last keys, as many as there are queries, as a link of the chain: a score becomes -inf where its element is false.
// Tiles of earlier keys, which are nearly all, ask nothing of memory.

struct TreeMask : HidesNothing<TreeMask>, ScoreTensor<unsigned char> {
    static constexpr bool kAddsToScores = true, kHasHeads = true;
//% if at_once
    static constexpr bool kLooks = true;
    int first_key;   // that it says something of
    u32 hidden[2];   // which scores of a lane's rows become -inf in the fragment that comes: bit j * 2 + e of column j * 8 + e
//% else
    int first_key;  // that it says something of
//% endif

    template <class Parameters>
    __device__ __forceinline__ static TreeMask of(const Parameters& p, int len_q, int len_kv) {
        return {{},
                {p.tree_mask, p.tree_mask_batch, p.tree_mask_head, p.tree_mask_query, p.tree_mask_key, len_q, len_q, {}},
                len_kv - len_q};
    }
//% if at_once
    // Reads the elements of a fragment: all of them before it looks at one, so that they are on their way together.
    template <int kTiles, class Position>
    __device__ __forceinline__ void look(const Position& position) {
        if (position.first_column + kTiles * 8 <= first_key) return;
        const int column = position.first_column + lane_index() % 4 * 2 - first_key;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned char* own = of_row[h] + static_cast<i64>(min(position.row(0, h), len_q - 1)) * query_step;
            unsigned char seen[kTiles][2];
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) seen[j][e] = own[static_cast<i64>(max(0, min(column + j * 8 + e, len_kv - 1))) * key_step];
            hidden[h] = 0;
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    hidden[h] |= static_cast<u32>(column + j * 8 + e >= 0 && !seen[j][e]) << (j * 2 + e);  // others hide what is behind
        }
    }
    template <class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ void add(float (&S)[kRowTiles][kTiles][4], RowOffset (&)[kRowTiles][2], const Position& position) const {
        static_assert(kRowTiles == 1 && kTiles <= 16, "a word has 32 bits");
        if (position.first_column + kTiles * 8 <= first_key) return;
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (hidden[e / 2] >> (j * 2 + e % 2) & 1) S[0][j][e] = -infinity();
    }
//% else
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
//% endif
};
