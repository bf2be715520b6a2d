// A mask in memory as a link of the chain: a score becomes -inf where its element is false.

struct BooleanMask : HidesNothing<BooleanMask>, ScoreTensor<unsigned char> {
    static constexpr bool kAddsToScores = true, kHasHeads = true;
//% if early
    static constexpr bool kLoadsAhead = true;
//% endif

    template <class Parameters>
    __device__ __forceinline__ static BooleanMask of(const Parameters& p, int len_q, int len_kv) {
//% if packed
        return {{}, {p.mask, p.mask_batch, p.mask_head, p.mask_query, p.mask_key, min(len_q, p.mask_len_q), min(len_kv, p.mask_len_kv),
                     p.mask_len_kv, {}}};
//% else
        return {{}, {p.mask, p.mask_batch, p.mask_head, p.mask_query, p.mask_key, len_q, len_kv, {}}};
//% endif
    }
    __device__ __forceinline__ float changed(float s, int query, int key) const { return at(query, key) ? s : -infinity(); }

    template <class Position, int kRowTiles, int kTiles>
    __device__ __forceinline__ void add(float (&S)[kRowTiles][kTiles][4], RowOffset (&)[kRowTiles][2], const Position& position) const {
        for_each(S, position, [](float& s, unsigned char seen) {
            if (!seen) s = -infinity();
        });
    }
};
