// The two matrix products of attention, for one warp: S = Q K^T and O += P V. In the backward pass the first one computes S^T = K Q^T and
// dP^T = V dO^T, with keys as rows.
//
// A warp owns kRowTiles * 16 rows. Accumulators are arrays [row tile][column tile of 8][4], laid out as mma_sync.cuh
// says: [0], [1] belong to row lane/4, [2], [3] to row lane/4 + 8.

// Where a lane finds its part of an operand in a tile that is kColumns wide, for ldmatrix. Of the left operand (Q) and of a transposed one
// (V): lanes 0 to 15 point at 16 rows, lanes 16 to 31 at the same rows one chunk further. Of the right operand (K): the second and the
// third of the four matrices swapped. An operand is two chunks wide; the offsets within a
// group of chunks are held in registers, and everything else is constants away or the same for all lanes.
template <int kColumns>
struct LaneOffsets {
    using Rows = SharedTile<16, kColumns>;
    static constexpr int kOffsets = Rows::kSwizzle / 2;
    u32 offset[kOffsets];
    // From the address in Q or V to that in K, whose four matrices are (keys, d), (keys, d + 8), (keys + 8, d), (keys + 8, d + 8) in this
    // order. One difference serves all offsets: row % 8 is the same in both, and the chunks differ in bit 0 alone, which i * 2 leaves.
    u32 to_keys;

    __device__ __forceinline__ LaneOffsets() {
        const int lane = lane_index();
        const Rows rows{0};
#pragma unroll
        for (int i = 0; i < kOffsets; ++i) {
            offset[i] = rows.at(lane % 16, lane / 16 ^ i * 2);
            launder(offset[i]);
        }
        to_keys = rows.at(lane / 16 * 8 + lane % 8, lane / 8 % 2) - offset[0];
        launder(to_keys);
    }
    __device__ __forceinline__ SharedAddress at(SharedAddress tile, int rows, int chunks) const {
        return offset[chunks / 2 % kOffsets] + tile + Rows::distance(rows, chunks / Rows::kSwizzle * Rows::kSwizzle);
    }
};

// Those for Q and K, and for V: one set where they are equally wide.
template <int kColumns, int kColumnsV>
struct OperandOffsets {
    LaneOffsets<kColumns> for_keys;
    LaneOffsets<kColumnsV> for_values;
    __device__ __forceinline__ const LaneOffsets<kColumns>& keys() const { return for_keys; }
    __device__ __forceinline__ const LaneOffsets<kColumnsV>& values() const { return for_values; }
};
template <int kColumns>
struct OperandOffsets<kColumns, kColumns> {
    LaneOffsets<kColumns> for_all;
    __device__ __forceinline__ const LaneOffsets<kColumns>& keys() const { return for_all; }
    __device__ __forceinline__ const LaneOffsets<kColumns>& values() const { return for_all; }
};

// Q read from shared memory at each use: costs bandwidth, saves registers. `rows` are the warp's.
template <int kColumns>
struct LeftInShared {
    const LaneOffsets<kColumns>& offsets;
    SharedAddress rows;

    __device__ __forceinline__ void fragment(u32 (&a)[4], int row_tile, int k) const {  // k: 16 columns of the contraction
        ldmatrix_x4(a, offsets.at(rows, row_tile * 16, k * 2));
    }
};

// Q read once and kept in registers: kColumns / 4 * kRowTiles of them.
template <int kRowTiles, int kColumns>
struct LeftInRegisters {
    u32 fragments[kRowTiles][kColumns / 16][4];

    __device__ __forceinline__ explicit LeftInRegisters(const LeftInShared<kColumns>& query) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int k = 0; k < kColumns / 16; ++k) query.fragment(fragments[i][k], i, k);
    }

    __device__ __forceinline__ void fragment(u32 (&a)[4], int row_tile, int k) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = fragments[row_tile][k][j];
    }
};

// One of the two.
template <bool kInRegisters, int kRowTiles, int kColumns>
struct LeftOperandOf {
    using Type = LeftInRegisters<kRowTiles, kColumns>;
};
template <int kRowTiles, int kColumns>
struct LeftOperandOf<false, kRowTiles, kColumns> {
    using Type = const LeftInShared<kColumns>&;
};
template <bool kInRegisters, int kRowTiles, int kColumns>
using LeftOperand = typename LeftOperandOf<kInRegisters, kRowTiles, kColumns>::Type;

// S = Q K^T for the column tiles [first, first + kCount), an even number of them. The tile at `keys` holds one key a row.
template <class Element, int kCount, class Query, int kRowTiles, int kKeyTiles, int kColumns>
__device__ __forceinline__ void gemm_scores(float (&S)[kRowTiles][kKeyTiles][4], int first, const Query& query,
                                            SharedAddress keys, const LaneOffsets<kColumns>& offsets) {
    const SharedAddress own_keys = keys + offsets.to_keys;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = first; j < first + kCount; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) S[i][j][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
        u32 a[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) query.fragment(a[i], i, k);
#pragma unroll
        for (int j = first; j < first + kCount; j += 2) {
            u32 b[4];  // (keys 0-7, d 0-7), (keys 0-7, d 8-15), (keys 8-15, d 0-7), (keys 8-15, d 8-15)
            ldmatrix_x4(b, offsets.at(own_keys, j * 8, k * 2));
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_sync_m16n8k16<Element>(S[i][j], a[i], b[0], b[1]);
                mma_sync_m16n8k16<Element>(S[i][j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// O += P V for a slice of 16 keys. The tile at `values` holds one key a row.
template <class Element, int kRowTiles, int kOutTiles, int kColumns>
__device__ __forceinline__ void gemm_output(float (&O)[kRowTiles][kOutTiles][4], const u32 (&P)[kRowTiles][4], int slice,
                                            SharedAddress values, const LaneOffsets<kColumns>& offsets) {
#pragma unroll
    for (int j = 0; j < kOutTiles; j += 2) {
        u32 b[4];  // (keys 0-7, d 0-7), (keys 8-15, d 0-7), (keys 0-7, d 8-15), (keys 8-15, d 8-15), each transposed
        ldmatrix_x4_trans(b, offsets.at(values, slice * 16, j));
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            mma_sync_m16n8k16<Element>(O[i][j], P[i], b[0], b[1]);
            mma_sync_m16n8k16<Element>(O[i][j + 1], P[i], b[2], b[3]);
        }
    }
}
