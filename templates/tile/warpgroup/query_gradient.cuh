// dQ = dS K of a tile of queries, added up over key tiles in memory. Its sum lies there in the order in which warps hold their
// accumulators, so that what a warp adds at once is contiguous; the kernel that rounds it has the same accumulators.
//
// Warpgroups share the product. Where a tile has 64 queries for each of two, each has its own queries and all columns. Else dQ is
// transposed, dQ^T = K^T dS^T, and each warpgroup has 64 columns and all queries: then any multiple of 16 queries will do.

template <class Element, int kQueries, int kColumns>
struct QueryGradient {
    static constexpr bool kTransposed = kQueries != 128;
    static constexpr int kWarps = kTransposed ? kColumns / 16 : kQueries / 16;  // that hold some of it, of 8
    static constexpr int kTiles = kTransposed ? kQueries / 8 : kColumns / 8;    // column tiles of an accumulator
    static constexpr int kFloats = kQueries * kColumns;                         // of a tile of queries in memory

    float dQ[kTiles][4];

    // By a warpgroup. Issued, not waited for. `dS` has a row for each query, `keys` one for each key.
    template <class DScoresTile, class KeyTile>
    __device__ __forceinline__ void gemm(DScoresTile dS, KeyTile keys, int warpgroup) {
        keep_in_register(dS.base);
        keep_in_register(keys.base);
        // A warpgroup that has no columns computes some for nothing: there are none of its warps in memory.
        if (kTransposed) keys.base += min(warpgroup, KeyTile::kPanels - 1) * KeyTile::kPanelBytes;
#pragma unroll
        for (int step = 0; step < KeyTile::kPanelBytes / 128 / 16; ++step) {
            if constexpr (kTransposed)
                wgmma_ss_trans_a<Element, kQueries>(dQ, keys.rows(step), dS.columns(0, step), step > 0);
            else
                wgmma_ss_trans_b<Element, kColumns>(dQ, dS.columns(warpgroup * 64, step), keys.rows(step), step > 0);
        }
    }
    // `sum`: of this tile of queries; `warp`: among those of both warpgroups.
    __device__ __forceinline__ static float* place(float* sum, int warp) { return sum + warp * kTiles * 128 + lane_index() * 4; }
    __device__ __forceinline__ void add_to(float* sum, int warp) const {
        if (kWarps < 8 && warp >= kWarps) return;
        float* own = place(sum, warp);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) red_add_f32_v4(own + j * 128, dQ[j]);
    }
    __device__ __forceinline__ void load(float* sum, int warp) {
        const uint4* own = reinterpret_cast<const uint4*>(place(sum, warp));
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const uint4 v = own[j * 32];
            const u32 bits[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) dQ[j][e] = __uint_as_float(bits[e]);
        }
    }
    // Rounds dQ * scale of a warp into a tile that has a row for each query.
    template <class Tile>
    __device__ __forceinline__ void store(const Tile& tile, int warp, float scale) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) dQ[j][e] *= scale;
        u32 rounded[kTiles / 2][4];
        round_to_operand<Element>(rounded, dQ);
        if constexpr (kTransposed) {
            store_transposed(tile, warp * 16, rounded);
        } else {
#pragma unroll
            for (int step = 0; step < kTiles / 2; ++step) {
                const PanelTile<kQueries, 64> panel{tile.base + step / 4 * Tile::kPanelBytes};
                const int lane = lane_index();
                stmatrix_x4(panel.at(warp * 16 + lane % 16, step % 4 * 2 + lane / 16), rounded[step][0], rounded[step][1], rounded[step][2],
                            rounded[step][3]);
            }
        }
    }
};
