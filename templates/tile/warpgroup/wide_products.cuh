// Products of a backward pass whose head dim is too wide for the accumulators of one warpgroup: two warpgroups divide the columns of dV,
// dK and dQ, by panels of 64. All operands are tiles in shared memory. P and dS have a row for each query.

// The columns of a warpgroup, of kAll: the first one has the odd panel, the last panel may be narrower.
template <int kAll, int kWarpgroup>
struct ColumnShare {
    static constexpr int kPanels = (kAll + 63) / 64, kFirst = kWarpgroup == 0 ? 0 : (kPanels + 1) / 2 * 64;
    static constexpr int kEnd = kWarpgroup == 0 ? (kPanels + 1) / 2 * 64 : kAll, kColumns = kEnd - kFirst;
    static_assert(kColumns > 0, "each warpgroup has a panel");
};

// The part of a tile from column `kFirst` on.
template <int kFirst, class Tile>
__device__ __forceinline__ Tile columns_from(Tile tile) {
    return {tile.base + kFirst / 64 * Tile::kPanelBytes};
}

// product += P^T dO or dS^T Q: keys as rows, over all queries of the tiles.
template <class Element, int kTiles, class ScoreTile, class RowTile>
__device__ __forceinline__ void gemm_over_queries(float (&product)[kTiles][4], ScoreTile score_rows, RowTile rows) {
    launder(score_rows.base);
    launder(rows.base);
#pragma unroll
    for (int step = 0; step < ScoreTile::kPanelBytes / 128 / 16; ++step)
        wgmma_ss_trans_ab<Element, kTiles * 8>(product, score_rows.mn_major(step), rows.mn_major(step), 1);
}

// product = dS K, or product += dS K if kAdd: queries as rows, over all keys of the tiles.
template <class Element, bool kAdd = false, int kTiles, class ScoreTile, class KeyTile>
__device__ __forceinline__ void gemm_over_keys(float (&product)[kTiles][4], ScoreTile d_scores, KeyTile keys) {
    launder(d_scores.base);
    launder(keys.base);
#pragma unroll
    for (int step = 0; step < KeyTile::kPanelBytes / 128 / 16; ++step)
        wgmma_ss_trans_b<Element, kTiles * 8>(product, d_scores.k_major(0, step), keys.mn_major(step), kAdd || step > 0);
}

// Reads what store_transposed wrote: the same registers.
template <class Tile, int kSteps>
__device__ __forceinline__ void load_transposed(u32 (&operand)[kSteps][4], const Tile& tile, int first_column) {
    const int lane = lane_index(), row = lane % 8 + lane / 16 * 8, chunk = first_column % 64 / 8 + lane / 8 % 2;
    const SharedAddress own = PanelTile<16, 64>{tile.base + first_column / 64 * Tile::kPanelBytes}.at(row, chunk);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ldmatrix_x4_trans(operand[step], own + step * 16 * 128);
}

// dS = P * (dP - row_delta), rounded, of P that are rounded already.
template <class Element, int kTiles>
__device__ __forceinline__ void differentiate_rounded(u32 (&d_scores)[kTiles / 2][4], const float (&dP)[kTiles][4],
                                                      const u32 (&P)[kTiles / 2][4], SharedAddress row_delta) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        float delta[2];
        load_shared_pair(delta[0], delta[1], row_delta + (j * 8 + lane_index() % 4 * 2) * 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float low, high;
            cvt_f32_x2<Element>(low, high, P[j / 2][j % 2 * 2 + h]);
            d_scores[j / 2][j % 2 * 2 + h] = cvt_rn_x2<Element>(low * (dP[j][h * 2] - delta[0]), high * (dP[j][h * 2 + 1] - delta[1]));
        }
    }
}

// What four warps add to dQ of a panel of 64 columns, in memory in the order of their accumulators: kQueries is 64, 16 of each warp.
template <int kColumns>
struct PanelSums {
    static constexpr int kFloats = 64 * kColumns, kWarps = (kColumns + 63) / 64 * 4;

    // Of column tile `tile` of 8, of a warp among all panels' warps.
    __device__ __forceinline__ static int offset(int panel, int warp, int tile) {
        const int tiles = min(8, kColumns / 8 - panel * 8);
        return panel * 64 * 64 + (warp * tiles + tile) * 128 + lane_index() * 4;
    }
    template <int kTiles>
    __device__ __forceinline__ static void add(float* d_q_sum, int panel, int warp, const float (&product)[kTiles][4]) {
        float* own = d_q_sum + offset(panel, warp, 0);
#pragma unroll
        for (int j = 0; j < kTiles; ++j)  // of the last panel's columns there may be fewer
            if (kColumns % 64 == 0 || panel * 8 + j < kColumns / 8) red_add_f32_v4(own + j * 128, product[j]);
    }
};

// The same as one warp has it who rounds them.
template <class Element, int kColumns>
struct PanelGradient : PanelSums<kColumns> {
    float dQ[8][4];

    __device__ __forceinline__ void load(const float* d_q_sum, int warp) {
        const uint4* own = reinterpret_cast<const uint4*>(d_q_sum + this->offset(warp / 4, warp % 4, 0));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint4 v = warp / 4 * 8 + j < kColumns / 8 ? own[j * 32] : uint4{0, 0, 0, 0};
            const u32 bits[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) dQ[j][e] = __uint_as_float(bits[e]);
        }
    }
    // Rounds dQ * scale of a warp into a tile that has a row for each query.
    template <class Tile>
    __device__ __forceinline__ void store(const Tile& tile, int warp, float scale) {
        const int lane = lane_index();
        const PanelTile<64, 64> panel{tile.base + warp / 4 * Tile::kPanelBytes};
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float (&pair)[4] = dQ[j + i / 2];
                r[i] = cvt_rn_x2<Element>(pair[i % 2 * 2] * scale, pair[i % 2 * 2 + 1] * scale);
            }
            stmatrix_x4(panel.at(warp % 4 * 16 + lane % 16, j + lane / 16), r[0], r[1], r[2], r[3]);
        }
    }
};
