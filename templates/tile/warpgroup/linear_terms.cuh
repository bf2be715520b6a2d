// Terms of scores that are linear in the key, as one more step of Q K^T: 16 further columns, which hold a slope in each row of Q, and in
// each row of K where that key is in its block. So they cost a product in place of an instruction for each score.
//
// They are linear beside the diagonal alone, where all keys of a block come before or after those of all rows (see Alibi), and count from
// the key that is nearest to it: what its scores are rounded by is in proportion to themselves, and not to a distance.

// A slope in three parts, each rounded to Element. Part i counts 2^(11 i), so that those of fp16 are no smaller than its numbers go.
constexpr int kSlopeParts = 3;
constexpr float kSlopePartScale = 0x1p11f;
// A slope of fp16 must be less than its largest number; others go the way of blocks across the diagonal.
constexpr float kSlopeEnd = 0x1p15f;

// The further columns of K. The contraction comes first, as in V: element (i, n), for i < 3, is the position of key n behind the last one
// of the block, in units of part i of a slope, and element (4 + i, n) the same before the first one. All others are 0. Every thread calls
// this; they meet before the first product.
template <class Element, int kBlockKv, class Tile>
__device__ __forceinline__ void fill_positions(Tile tile, int threads) {
    for (int index = thread_index(); index < 16 * (kBlockKv / 8); index += threads) {
        const int row = index % 16, chunk = index / 16, part = row % 4;
        const bool is_used = row < 8 && part < kSlopeParts;
        const float of_part = part == 0 ? 1.0f : part == 1 ? 1.0f / kSlopePartScale : 1.0f / kSlopePartScale / kSlopePartScale;
        const float unit = is_used ? of_part : 0.0f;
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = chunk * 8 + i * 2;
            const int low = row < 4 ? key - (kBlockKv - 1) : -key, high = row < 4 ? low + 1 : low - 1;
            pairs[i] = cvt_rn_x2<Element>(static_cast<float>(low) * unit, static_cast<float>(high) * unit);
        }
        store_shared_v4(Tile{tile.base + chunk / 8 * Tile::kPanelBytes}.at(row, chunk % 8), {pairs[0], pairs[1], pairs[2], pairs[3]});
    }
    fence_proxy_async();
}

// Where all columns of a block are.
enum class Side { kAcross, kBefore, kAfter };  // of the diagonal of all rows

// The terms of a consumer's 64 rows. The product adds them beside the diagonal; across it, and in the first block of a work tile, whose
// rows are not known yet when its product is issued, it adds none. Nothing is left to be found by who has the turn, or waits for scores.
template <class Element, int kBlockKv, int kPackGqa>
struct LinearTerms {
    static constexpr int kRowStep = 8 / kPackGqa;  // from the query of a lane's first row to that of its second
    static constexpr bool kTwoHeads = kPackGqa > 8;
    int before, after;        // blocks below the first come before the diagonal of all rows, those from the second on behind it
    int row;                  // of a lane's first row, along the diagonal
    Side side = Side::kAcross, next = Side::kAcross;  // of the block whose scores come next, and of the one after it
    u32 operand[4] = {};      // of their product: the further columns of Q
    float minuend[2];         // of its exponents: see OnlineSoftmax

    // A work tile begins. `rows`: where all rows are, and `own` those of this warp, in block 0.
    template <class Chain, class Position>
    __device__ __forceinline__ void begin(const Chain& chain, const Position& rows, const Position& own) {
        const int first = chain.distance(rows, rows.first_row_of_warp()), last = chain.distance(rows, rows.template last_row_of_warp<4>());
        const bool fits = fabsf(chain.slope[0]) < kSlopeEnd && fabsf(chain.slope[1]) < kSlopeEnd;
        const bool all_fit = !vote_sync_any(!fits);  // the same in each warp, which has the heads of all rows
        before = all_fit ? max(first + 1, 0) / kBlockKv : 0;
        after = all_fit ? (max(last, 0) + kBlockKv - 1) / kBlockKv : 0x7fffffff;
        row = chain.distance(own, own.row(0, 0));
        launder(row);  // a register, and not some instructions in each block
    }
    // Which block comes after this one of the work tile that has begun: of another tile nothing is known.
    __device__ __forceinline__ void look_ahead(int block, int lowest_block) {
        next = block <= lowest_block ? Side::kAcross : block - 1 < before ? Side::kBefore : block > after ? Side::kAfter : Side::kAcross;
    }
    // While the product of a block is under way: what its exponents are subtracted from, and what block comes after it.
    template <class Softmax, class Chain>
    __device__ __forceinline__ void prepare(const Softmax& softmax, const Chain& chain, int block, int lowest_block) {
        RowOffset offset[2];
        find_offsets(offset, chain, block);
        softmax.subtract_row_max(minuend, offset);
        for (int h = 0; h < 2; ++h) compute_here(minuend[h]);
        look_ahead(block, lowest_block);
    }
    // That block comes next, and no product is under way.
    template <class Chain>
    __device__ __forceinline__ void turn(const Chain& chain) {
        if (next != side) {
            side = next;
            split_slopes(chain.slope, chain.slope_low);
        }
        keep_operand();  // else the compiler does this where the product is issued
    }
    // Its registers: until the product is complete, and from where they are made.
    __device__ __forceinline__ void keep_operand() {
        launder(operand[0]);
        launder(operand[1]);
    }
    // Where the product adds none.
    template <class Chain>
    __device__ __forceinline__ void add(float (&S)[kBlockKv / 8][4], const Chain& chain, int block) const {
        if (side != Side::kAcross) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) chain.template add_to_row<kTwoHeads>(S, h, row + h * kRowStep - block * kBlockKv);
    }
    // What the product leaves to be added to each row of the block.
    template <class Chain>
    __device__ __forceinline__ void find_offsets(RowOffset (&offset)[2], const Chain& chain, int block) const {
        const int nearest = block * kBlockKv + (side == Side::kBefore ? kBlockKv - 1 : 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float distance = side == Side::kAcross ? 0.0f : fabsf(static_cast<float>(row + h * kRowStep - nearest));
            offset[h] = {-chain.slope[kTwoHeads * h], -chain.slope_low[kTwoHeads * h], distance};
        }
    }

  private:
    // Of a lane's two rows: columns 2 * (lane % 4) and the next. Parts of their slopes, where the positions of that side are.
    __device__ __forceinline__ void split_slopes(const float (&slope)[2], const float (&slope_low)[2]) {
        const int lane = lane_index() % 4;
        const bool is_here = side == (lane < 2 ? Side::kBefore : Side::kAfter), is_first = lane % 2 == 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float high, middle, unused;
            cvt_f32_x2<Element>(high, unused, cvt_rn_x2<Element>(slope[h], 0.0f));
            const float rest = (slope[h] - high) * kSlopePartScale;
            cvt_f32_x2<Element>(middle, unused, cvt_rn_x2<Element>(rest, 0.0f));
            const float low = (rest - middle + slope_low[h] * kSlopePartScale) * kSlopePartScale;
            operand[h] = is_here ? cvt_rn_x2<Element>(is_first ? high : low, is_first ? middle : 0.0f) : 0u;
        }
    }
};

// They are found anew where they are asked for, which few blocks do.
template <class Terms, class Chain>
struct LinearOffsets {
    const Terms& terms;
    const Chain& chain;
    int block;

    __device__ __forceinline__ void find(RowOffset (&offset)[2]) const {
        int here = block;
        launder(here);  // else they are found in every block
        terms.find_offsets(offset, chain, here);
    }
};
template <class Terms, class Chain>
LinearOffsets(const Terms&, const Chain&, int) -> LinearOffsets<Terms, Chain>;
