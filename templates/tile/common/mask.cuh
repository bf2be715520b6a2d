// What the chain makes of S in the forward kernels, whose rows are queries.

// S = -inf where the chain hides a key from a query. `first_key` is the key of this warp's first column, `first_position` the position of
// its first row in the sequence: each query has kPackGqa of them, under PackGQA one for each head.
template <int kPackGqa = 1, class Chain, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void mask_scores(float (&S)[kRowTiles][kKeyTiles][4], int first_position, int first_key, const Chain& chain) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int query = (first_position + i * 16 + e / 2 * 8 + lane / 4) / kPackGqa;
            const KeyRange seen = chain.keys(query);
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                const int key = first_key + j * 8 + lane % 4 * 2 + e % 2;
//% if opens
                if (key >= seen.end || (Chain::kHidesFirstKeys && key < seen.begin && key >= chain.prefix)) S[i][j][e] = -infinity();
//% else
                if (key >= seen.end || (Chain::kHidesFirstKeys && key < seen.begin)) S[i][j][e] = -infinity();
//% endif
            }
        }
}
//% if scatters

// The same by ranges of the chain, if it is `cut` by them, and by scattered masks, if it `hides` some of its keys.
template <int kPackGqa, class Chain, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void mask_scores(float (&S)[kRowTiles][kKeyTiles][4], const ScorePosition<false, kPackGqa>& position, bool cut,
                                            bool hides, const Chain& chain) {
    if (cut) mask_scores<kPackGqa>(S, position.first_row, position.first_column, chain);
    if (hides) hide_scattered(S, position, chain);
}
//% endif
