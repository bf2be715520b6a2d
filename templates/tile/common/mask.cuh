// The mask of the forward kernels: S = -inf where a query does not see a key.

// `first_row` and `first_key` are the positions of S[0][0] of this warp. Under PackGQA kPackGqa rows, one of each head, belong to a query.
// A query sees the keys below min(len_kv, query + 1 + causal_offset); bottom-right alignment takes causal_offset = len_kv - len_q.
template <bool kCausal, int kPackGqa = 1, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void mask_scores(float (&S)[kRowTiles][kKeyTiles][4], int first_row, int first_key, int len_kv,
                                            int causal_offset) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int query = (first_row + i * 16 + e / 2 * 8 + lane / 4) / kPackGqa;
            const int end = kCausal ? min(len_kv, query + 1 + causal_offset) : len_kv;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j)
                if (first_key + j * 8 + lane % 4 * 2 + e % 2 >= end) S[i][j][e] = -infinity();
        }
}
