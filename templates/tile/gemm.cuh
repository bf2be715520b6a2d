// The two matrix products of attention, for one warp: S = Q K^T and O += P V.
//
// A warp owns kRowTiles * 16 query rows. Accumulators are arrays [row tile][column tile of 8][4], laid out as mma_sync.cuh
// says: [0], [1] belong to row lane/4, [2], [3] to row lane/4 + 8.

// Q read from shared memory at each use: costs bandwidth, saves registers. The tile's rows from `first_row` on are the warp's.
template <int kRowTiles, int kRows, int kColumns>
struct QueryInShared {
    typename SharedTile<kRows, kColumns>::Place place;

    __device__ __forceinline__ QueryInShared(const SharedTile<kRows, kColumns>& tile, int first_row)
        : place(tile.place(first_row + lane_index() % 16, lane_index() / 16)) {}

    __device__ __forceinline__ void fragment(u32 (&a)[4], int row_tile, int step) const {
        ldmatrix_x4(a, place.at(row_tile * 16, step * 2));
    }
};

// Q read once and kept in registers: kColumns / 4 * kRowTiles of them.
template <int kRowTiles, int kRows, int kColumns>
struct QueryInRegisters {
    u32 fragments[kRowTiles][kColumns / 16][4];

    __device__ __forceinline__ explicit QueryInRegisters(const QueryInShared<kRowTiles, kRows, kColumns>& query) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int step = 0; step < kColumns / 16; ++step) query.fragment(fragments[i][step], i, step);
    }

    __device__ __forceinline__ void fragment(u32 (&a)[4], int row_tile, int step) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = fragments[row_tile][step][j];
    }
};

// scores = Q K^T; `keys` holds one key a row.
template <class Element, class Query, int kRowTiles, int kKeyTiles, int kKeys, int kColumns>
__device__ __forceinline__ void gemm_scores(float (&scores)[kRowTiles][kKeyTiles][4], const Query& query,
                                            const SharedTile<kKeys, kColumns>& keys) {
    const int lane = lane_index();
    const auto place = keys.place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i][j][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
        u32 a[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) query.fragment(a[i], i, step);
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
            u32 b[4];  // (keys 0-7, d 0-7), (keys 0-7, d 8-15), (keys 8-15, d 0-7), (keys 8-15, d 8-15)
            ldmatrix_x4(b, place.at(j * 8, step * 2));
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_sync_m16n8k16<Element>(scores[i][j], a[i], b[0], b[1]);
                mma_sync_m16n8k16<Element>(scores[i][j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// out += P V; `values` holds one key a row. The accumulator layout of two neighbouring column tiles of P is the operand
// layout of one step of 16 keys, so P goes from product to product in registers, rounded to Element on the way.
template <class Element, int kRowTiles, int kKeyTiles, int kOutTiles, int kKeys, int kColumns>
__device__ __forceinline__ void gemm_output(float (&out)[kRowTiles][kOutTiles][4],
                                            const float (&probabilities)[kRowTiles][kKeyTiles][4],
                                            const SharedTile<kKeys, kColumns>& values) {
    const auto place = values.place(lane_index() % 16, lane_index() / 16);
#pragma unroll
    for (int step = 0; step < kKeyTiles / 2; ++step) {
        u32 a[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float(&pair)[4] = probabilities[i][step * 2 + e / 2];
                a[i][e] = cvt_rn_x2<Element>(pair[e % 2 * 2], pair[e % 2 * 2 + 1]);
            }
#pragma unroll
        for (int j = 0; j < kOutTiles; j += 2) {
            u32 b[4];  // (keys 0-7, d 0-7), (keys 8-15, d 0-7), (keys 0-7, d 8-15), (keys 8-15, d 8-15), each transposed
            ldmatrix_x4_trans(b, place.at(step * 16, j));
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_sync_m16n8k16<Element>(out[i][j], a[i], b[0], b[1]);
                mma_sync_m16n8k16<Element>(out[i][j + 1], a[i], b[2], b[3]);
            }
        }
    }
}
