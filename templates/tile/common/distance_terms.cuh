// What scores gain by the distance from query to key alone. Scores of one distance gain the same, so that rows 8 apart have what columns 8
// apart have: of a fragment of 16 rows and n columns a lane computes 2 (n / 8 + 1) terms for 4 n / 8 scores.

// Elements of a captured tensor, without a look at each index where all of them are there: those of two neighbouring columns, and from
// these on those of columns 8 further.
template <class Element>
struct CapturedLine {
    const Element* first[2];
    int offset, step;  // in elements

    __device__ __forceinline__ auto at(int e) const { return widened(first[e][offset]); }
    __device__ __forceinline__ void advance() {
        offset += step;
        launder(offset);  // else the compiler would begin anew for each, which takes more instructions
    }
};

__device__ __forceinline__ bool is_inside(int index, int size) { return static_cast<u32>(index) < static_cast<u32>(size); }

// From the element of these indices on, of which that of kDimension must be inside, and moves by `by` from one column to the next. Without
// elements that are there, the first one of the tensor again and again.
template <int kDimension, class Element, int kRank, class... Indices>
__device__ __forceinline__ CapturedLine<Element> line_of(const CapturedTensor<Element, kRank>& tensor, bool are_there, int by,
                                                         Indices... indices) {
    int offset = 0;
    int dimension = 0;
    ((offset += (dimension != kDimension ? tensor.in_range(indices, tensor.sizes[dimension]) : are_there ? static_cast<int>(indices) : 0) *
                tensor.strides[dimension],
      ++dimension),
     ...);
    const int step = are_there ? by * tensor.strides[kDimension] : 0;
    return {{tensor.first, tensor.first + step}, are_there ? offset : 0, step * 8};
}

// Those of a lane's scores in a fragment. kBehind: of its 8-row steps all but the first, each of which has one distance more.
template <int kRowTiles, int kTiles>
struct DistanceTerms {
    static constexpr int kBehind = kRowTiles * 2 - 1;
    bool are_known;
    float terms[kBehind + kTiles][2];

    // Not where some element is not there or, in the backward pass, a query is past the end, for which terms may be NaN.
    template <class Functions, class Position>
    __device__ __forceinline__ static bool can_know(const Functions& functions, const Position& position, int batch, int head,
                                                    int len_q) {
        const int from_first_row = position.first_column - position.first_row;
        const int least = from_first_row - kRowTiles * 16 + 1, most = from_first_row + kTiles * 8 - 1;  // columns less rows
        if constexpr (Position::kRowsAreKeys)
            return functions.are_inside(batch, head, least, most) && position.first_column + kTiles * 8 <= len_q;
        else
            return functions.are_inside(batch, head, -most, -least);
    }
    // Calls take(n, e, term): the distance from a lane's last row to its column e, and then, n times, to one 8 columns further. Where terms
    // cannot be known, they are of other elements.
    template <class Functions, class Position, class Take>
    __device__ __forceinline__ static void for_each(const Functions& functions, const Position& position, int batch, int head,
                                                    const Take& take) {
        constexpr bool kRowsAreKeys = Position::kRowsAreKeys;
        const int row = position.row(0, 0), column = position.first_column + lane_index() % 4 * 2;
        const int first = column - row - kBehind * 8, last = column - row + kTiles * 8 - 7;
        const bool inside = functions.are_inside(batch, head, kRowsAreKeys ? first : -last, kRowsAreKeys ? last : -first);
        auto lines = functions.lines_from(inside, batch, head, kRowsAreKeys ? first : -first, kRowsAreKeys ? 1 : -1);
#pragma unroll
        for (int n = 0; n < kBehind + kTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int of_row = row + max(kBehind - n, 0) * 8, of_column = column + max(n - kBehind, 0) * 8 + e;
                const int query = kRowsAreKeys ? of_column : of_row, key = kRowsAreKeys ? of_row : of_column;
                take(n, e, functions.added(lines, e, batch, head, query, key));
            }
            if (n + 1 < kBehind + kTiles) lines.advance();
        }
    }
    template <class Functions, class Position>
    __device__ __forceinline__ static DistanceTerms of(const Functions& functions, const Position& position, int batch, int head,
                                                       int len_q) {
        DistanceTerms found{can_know(functions, position, batch, head, len_q), {}};
        for_each(functions, position, batch, head, [&](int n, int e, float term) { found.terms[n][e] = term; });
        return found;
    }
    __device__ __forceinline__ void add_to(float (&S)[kRowTiles][kTiles][4], float per_unit) const {
#pragma unroll
        for (int n = 0; n < kBehind + kTiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) add_to(S, n, e, terms[n][e], per_unit);
    }
    // To the scores of a distance.
    __device__ __forceinline__ static void add_to(float (&S)[kRowTiles][kTiles][4], int n, int e, float term, float per_unit) {
#pragma unroll
        for (int row = 0; row <= kBehind; ++row) {
            const int j = n - kBehind + row;
            if (j >= 0 && j < kTiles) S[row / 2][j][row % 2 * 2 + e] = fmaf(term, per_unit, S[row / 2][j][row % 2 * 2 + e]);
        }
    }
};

// Where scores lie, with their terms: these are known before the scores are, and elements are on their way while products are.
template <class Position, class Terms>
struct PositionWithTerms : Position {
    Terms terms;
};
template <int kRowTiles, int kTiles, class Position, class Chain>
__device__ __forceinline__ PositionWithTerms<Position, DistanceTerms<kRowTiles, kTiles>> with_terms(const Position& position,
                                                                                                    const Chain& chain) {
    return {position, chain.template distance_terms<kRowTiles, kTiles>(position)};
}
