// Terms of scores that are linear in the key, as ALiBi's are under a causal mask, where all keys that a row sees come before it. They are a
// part of the exponential: its exponent is S * scale_log2 + addend, and a lane's two rows have the same addend in a column, so that it
// takes one more instruction for two scores. For that the two rows share a row max, and the second one has the terms of the first, which is
// some queries above: what it loses more is the same for all of its keys, and nobody but lse must know.

// How far the row max that rows share may be above the highest exponent of either, in base 2: P must hold such small numbers. Warps with
// rows further apart go the way of huge rows.
template <class Element>
__device__ __forceinline__ float most_apart();
template <>
__device__ __forceinline__ float most_apart<Bf16>() { return 48.0f; }
template <>
__device__ __forceinline__ float most_apart<Fp16>() { return 10.0f; }
// The same of what a slope alone makes of that. Slopes of up to 0.86 keep to it.
constexpr float kMostBySlope = 5.0f;
// Beyond that much of it lse shows what exponents are rounded by, where scores of all rows are so near 0 that nothing else is rounded.
constexpr float kSteep = 2.0f, kNearZero = 0.5f;
// Rows that see fewer keys do not share: out and lse of such need an exact P of the highest score, 1.
constexpr int kFewKeys = 16;

// Of a work tile, and of the block whose exponents come next.
template <int kBlockKv, int kPackGqa>
struct LinearTerms {
    static_assert(kPackGqa <= 8, "a lane's rows must be of one head");
    static constexpr int kRowStep = 8 / kPackGqa;  // from the query of a lane's first row to that of its second
    static constexpr int kNearest = kBlockKv - 7;  // from a lane's first column to its last one, which is the nearest to the diagonal
    static constexpr float kLn2 = 0.693147182f;
    float slope, slope_low;  // of the exponent, in two floats
    int row;                 // of a lane's first row along the diagonal, from its last column in block 0
    float nearest, step;     // the addend of a lane's last column, and by how much addends rise from key to key

    // A work tile begins. `own`: where the rows of this warp are, in block 0.
    template <class Chain, class Position>
    __device__ __forceinline__ void begin(const Chain& chain, const Position& own, float scale_log2) {
        slope = mul_rn(chain.slope[0], scale_log2);
        slope_low = fmaf(chain.slope[0], scale_log2, -slope) + chain.slope_low[0] * scale_log2;
        row = chain.distance(own, own.row(0, 0)) - lane_index() % 4 * 2 - kNearest;
        launder(row);  // a register, and not some instructions in each block
    }
    __device__ __forceinline__ float distance(int block) const { return static_cast<float>(row - block * kBlockKv); }
    // Finds addends less a row max, while the product of the block is under way.
    __device__ __forceinline__ void prepare(int block, float row_max) {
        step = slope;
        nearest = fmaf(-slope_low, distance(block), fmaf(-slope, distance(block), -row_max));
        compute_here(nearest);
    }
    // The same across the diagonal. A row meets it far from the last column, whose addend may be large, and is rounded once for all keys:
    // lse would show that. Returns by how much times itself a sum of P is more for it.
    __device__ __forceinline__ float find(int block, float row_max) {
        const float term = mul_rn(-slope, distance(block));
        const float low = fmaf(-slope, distance(block), -term) - slope_low * fmaxf(distance(block), 0.0f);
        step = slope;
        nearest = term - row_max;
        return kLn2 * ((-row_max - (nearest - term)) + low);
    }
    // No addends are left: terms have been added to scores.
    __device__ __forceinline__ void clear() { nearest = step = 0.0f; }
    // Of column e of column tile j.
    __device__ __forceinline__ float addend(int j, int e) const { return fmaf(step, static_cast<float>(j * 8 + e - kNearest), nearest); }

    // How much more a row half way to the second one would have lost than the first.
    __device__ __forceinline__ float half_a_step() const { return slope * (kRowStep * 0.5f); }
    // Whether rows may share a row max, for all that slopes and numbers of keys say. With a slope below 0 the farthest keys count for most,
    // and lse would show what their addends, which are large, are rounded by.
    __device__ __forceinline__ bool may_share() const {
        return slope >= 0.0f && half_a_step() <= kMostBySlope && row + lane_index() % 4 * 2 + kNearest >= kFewKeys - 1;
    }
    // The second row's own row max. `total`, of its P, takes what that is rounded by.
    __device__ __forceinline__ float row_max_of_second(float row_max, float& total) const {
        const float less = slope * kRowStep, own = row_max - less, less_in_own = own - row_max;
        const float rest = (row_max - (own - less_in_own)) - (less + less_in_own) - slope_low * kRowStep;
        total = fmaf(total, kLn2 * rest, total);
        return own;
    }
};

// Terms of a block, and how `consumer` adds them to scores where rows do not share.
template <class Terms, class Consumer>
struct BlockTerms {
    Terms& terms;
    const Consumer& consumer;
    int block;

    template <int kTiles>
    __device__ __forceinline__ void add_whole(float (&S)[kTiles][4]) const {
        const auto chain = consumer.chain_of_heads();
        const auto position = consumer.position();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int distance = chain.distance(position, position.row(0, h));
            launder(distance);  // else lengths would be found before the branch that adds them
            chain.template add_to_row<false>(S, h, distance);
        }
        terms.clear();
    }
};
template <class Terms, class Consumer>
BlockTerms(Terms&, const Consumer&, int) -> BlockTerms<Terms, Consumer>;
