// dQ = dS K of a tile of queries, added up over key tiles in memory. Its sum lies there in the order in which warps hold their
// accumulators, so that what a warp adds at once is contiguous; whoever rounds it holds the same accumulators.
//
// dQ comes in units of 64 rows of an accumulator. Where a tile has 128 queries, a unit is 64 of them and all columns. Else dQ is
// transposed, dQ^T = K^T dS^T, and a unit is 64 columns and all queries: then any multiple of 16 queries will do. Each of two warpgroups
// computes half of the units; where their number is odd, both compute the middle one, for half of the queries each.

// dQ as warps hold it that round it: one for each 16 rows of a unit.
template <class Element, int kQueries, int kColumns>
struct QueryGradient {
    static constexpr bool kTransposed = kQueries != 128;
    static constexpr int kWarps = kTransposed ? kColumns / 16 : kQueries / 16;
    static constexpr int kTiles = kTransposed ? kQueries / 8 : kColumns / 8;  // column tiles of an accumulator
    static constexpr int kFloats = kQueries * kColumns;                       // of a tile of queries in memory

    float dQ[kTiles][4];

    // `d_q_sum`: of this tile of queries; `warp`: among those of all units.
    __device__ __forceinline__ static float* own_sums(float* d_q_sum, int warp) { return d_q_sum + warp * kTiles * 128 + lane_index() * 4; }
    __device__ __forceinline__ void load(float* d_q_sum, int warp) {
        const uint4* own = reinterpret_cast<const uint4*>(own_sums(d_q_sum, warp));
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
        store_rounded(tile, warp, 0, rounded);
    }
    // Puts a warp's rounded column tiles from `first` (even) on into the tile.
    template <class Tile, int kSteps>
    __device__ __forceinline__ static void store_rounded(const Tile& tile, int warp, int first, const u32 (&rounded)[kSteps][4]) {
        if constexpr (kTransposed) {
            store_transposed(Tile{tile.base + first * 8 * 128}, warp * 16, rounded);
        } else {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const int lane = lane_index(), column = first + step * 2;
                const PanelTile<kQueries, 64> panel{tile.base + column / 8 * Tile::kPanelBytes};
                stmatrix_x4(panel.at(warp * 16 + lane % 16, column % 8 + lane / 16), rounded[step][0], rounded[step][1], rounded[step][2],
                            rounded[step][3]);
            }
        }
    }
};

// What a warpgroup computes of dQ.
template <class Element, int kQueries, int kColumns>
struct QueryGradientShare {
    using Sums = QueryGradient<Element, kQueries, kColumns>;
    static constexpr int kUnits = Sums::kTransposed ? (kColumns + 63) / 64 : kQueries / 64, kOwn = kUnits / 2;  // of it alone
    static constexpr int kTiles = Sums::kTiles, kHalf = kUnits % 2 * kTiles / 2;  // column tiles of a unit, and of half of one

    float dQ[kOwn * kTiles + kHalf][4];  // its own units, then what it has of the middle one

    __device__ __forceinline__ static int first_unit(int warpgroup) { return warpgroup * (kUnits - kOwn); }

    // Issued, not waited for. `dS` has a row for each query, `keys` one for each key.
    template <class DScoresTile, class KeyTile>
    __device__ __forceinline__ void gemm(DScoresTile dS, KeyTile keys, int warpgroup) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) gemm_of_unit<kTiles>(i * kTiles, dS, 0, keys, first_unit(warpgroup) + i);
        if constexpr (kHalf > 0) gemm_of_unit<kHalf>(kOwn * kTiles, dS, warpgroup * kHalf * 8, keys, kOwn);
    }
    // `d_q_sum`: of this tile of queries; `warp`: among those of both warpgroups.
    __device__ __forceinline__ void add_to(float* d_q_sum, int warp) const {
        launder(warp);  // else places in memory, which are needed once a tile, would be kept in registers
        const int warpgroup = warp / 4;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) add_of_unit<kTiles>(i * kTiles, d_q_sum, first_unit(warpgroup) + i, warp % 4, 0);
        if constexpr (kHalf > 0) add_of_unit<kHalf>(kOwn * kTiles, d_q_sum, kOwn, warp % 4, warpgroup * kHalf);
    }

  private:
    // Column tiles of the accumulator from `first` on, for all queries or those from `first_query` on.
    template <int kCount, class DScoresTile, class KeyTile>
    __device__ __forceinline__ void gemm_of_unit(int first, DScoresTile dS, int first_query, KeyTile keys, int unit) {
        float(&product)[kCount][4] = reinterpret_cast<float(&)[kCount][4]>(dQ[first]);
        if (Sums::kTransposed) keys.base += unit * KeyTile::kPanelBytes;
        launder(dS.base);
        launder(keys.base);
#pragma unroll
        for (int step = 0; step < KeyTile::kPanelBytes / 128 / 16; ++step) {
            if constexpr (Sums::kTransposed)
                wgmma_ss_trans_a<Element, kCount * 8>(product, keys.mn_major(step), dS.k_major(first_query, step), step > 0);
            else
                wgmma_ss_trans_b<Element, kCount * 8>(product, dS.k_major(unit * 64, step), keys.mn_major(step), step > 0);
        }
    }
    // Where the head dim ends within the last unit, some warps have no columns of it in memory.
    template <int kCount>
    __device__ __forceinline__ void add_of_unit(int first, float* d_q_sum, int unit, int warp, int first_tile) const {
        if (Sums::kWarps < kUnits * 4 && unit * 4 + warp >= Sums::kWarps) return;
        float* own = Sums::own_sums(d_q_sum, unit * 4 + warp) + first_tile * 128;
#pragma unroll
        for (int j = 0; j < kCount; ++j) red_add_f32_v4(own + j * 128, dQ[first + j]);
    }
};
