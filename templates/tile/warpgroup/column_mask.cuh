// What the chain makes of S where it hides keys at both ends of a range, as windows do: in place of common/mask.cuh. Which columns a row
// sees are bits of a word. Seven of them become predicates at once, so that a score takes one instruction, and not three that compare its
// key with both ends.

// A lane has two neighbouring columns of each eight: bits 2 * j and 2 * j + 1 of a word for 128 columns. Those below `column`, which counts
// from the lane's first one.
__device__ __forceinline__ u32 columns_below(int column) {
    const int within = min(max(column, 0), 128), bits = within / 8 * 2 + min(within % 8, 2);
    return static_cast<u32>((1ull << bits) - 1);
}

// S = -inf where the ranges of the chain hide a key from a query. `first_key` is the key of the first column, `first_position` the position
// of this warp's first row in the sequence: each query has kPackGqa of them, under PackGQA one for each head.
template <int kPackGqa = 1, class Chain, int kKeyTiles>
__device__ __forceinline__ void mask_scores(float (&S)[1][kKeyTiles][4], int first_position, int first_key, const Chain& chain) {
    const int lane = lane_index();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const KeyRange seen = chain.keys((first_position + h * 8 + lane / 4) / kPackGqa);
#pragma unroll
        for (int first = 0; first < kKeyTiles; first += 16) {
            const int origin = first_key + first * 8 + lane % 4 * 2;
            u32 visible = columns_below(seen.end - origin) & ~columns_below(seen.begin - origin);
//% if opens
            visible |= columns_below(max(chain.prefix, 0) - origin);
//% endif
#pragma unroll
            for (int j = first; j < kKeyTiles && j < first + 16; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (!(visible >> (j % 16 * 2 + e) & 1)) S[0][j][h * 2 + e] = -infinity();
        }
    }
}
//% if scatters

// The same by ranges of the chain, if it is `cut` by them, and by scattered masks, if it `hides` some of its keys.
template <int kPackGqa, class Chain, int kKeyTiles>
__device__ __forceinline__ void mask_scores(float (&S)[1][kKeyTiles][4], const ScorePosition<false, kPackGqa>& position, bool cut,
                                            bool hides, const Chain& chain) {
    if (cut) mask_scores<kPackGqa>(S, position.first_row, position.first_column, chain);
    if (hides) hide_scattered(S, position, chain);
}
//% endif
