// Which scores count: sets the others to -inf. Score modifications (biases, windows, soft caps) would have their place here.

// `first_row` and `first_key` are the positions of scores[0][0] of this warp; kHeads rows, of as many heads, are of one query. A key counts if
// it is below min(len_kv, query + 1 + diagonal): for a causal mask aligned bottom-right, diagonal = len_kv - len_q.
template <bool kCausal, int kHeads = 1, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void mask_scores(float (&scores)[kRowTiles][kKeyTiles][4], int first_row, int first_key, int len_kv, int diagonal) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int query = (first_row + i * 16 + e / 2 * 8 + lane / 4) / kHeads;
            const int end = kCausal ? min(len_kv, query + 1 + diagonal) : len_kv;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j)
                if (first_key + j * 8 + lane % 4 * 2 + e % 2 >= end) scores[i][j][e] = -infinity();
        }
}
