// How much of a block of queries and keys masks let queries see, as a block mask has it.

constexpr int kNothingSeen = 0, kPartSeen = 1, kAllSeen = 2;

// A block of those in [batches, heads, rows, columns].
struct MaskBlock {
    int batch, head, row, column;

    template <class Parameters>
    __device__ __forceinline__ static MaskBlock of(const Parameters& p, int index) {
        const int rows = index / p.mask_columns, heads = rows / p.mask_rows, batch = heads / p.mask_heads;
        return {batch, heads - batch * p.mask_heads, rows - heads * p.mask_rows, index - rows * p.mask_columns};
    }
    template <class Parameters>
    __device__ __forceinline__ TileBounds bounds(const Parameters& p) const {
        const int first_query = row * p.block_q, first_key = column * p.block_kv;
        return {first_query, min(first_query + p.block_q, p.len_q), first_key, min(first_key + p.block_kv, p.len_kv)};
    }
};

// By a warp. Parts of a condition may tell less than there is to know, and a block mask is used many times: then each key is looked at.
template <class Chain>
__device__ __forceinline__ int state_of(const Chain& chain, const TileBounds& block) {
    if (block.first_query >= block.end_query || block.first_key >= block.end_key) return kNothingSeen;
    SeenInTile seen = seen_in_tile(chain, block);
    if (seen.some && !seen.all) seen = look_at(chain, block);
    return !seen.some ? kNothingSeen : seen.all ? kAllSeen : kPartSeen;
}
