//% if packed
// Tensors [batch, heads_q, len_q, len_kv] of which each score has an element, in memory in any way: a step is 0 where they are the same.
// A packed sequence may be longer than its part of the tensor: elements that are not there are 0, and so are those of queries past its end,
// where the tensor may have anything.

//% else
// Tensors [batch, heads_q, len_q, len_kv] of which each score has an element, in memory in any way: a step is 0 where they are the same.

//% endif
// Two neighbouring elements as one word in memory.
template <class T, int kBytes = sizeof(T)>
struct ElementPair;
template <class T>
struct ElementPair<T, 1> {
    u16 word;
//% if early
    __device__ __forceinline__ static ElementPair of(T low, T high) { return {static_cast<u16>(low | high << 8)}; }
//% endif
    __device__ __forceinline__ T get(int i) const { return static_cast<T>(word >> i * 8 & 0xff); }
};
template <class T>
struct ElementPair<T, 2> {
    u32 word;
//% if early
    __device__ __forceinline__ static ElementPair of(T low, T high) { return {low.bits | static_cast<u32>(high.bits) << 16}; }
//% endif
    __device__ __forceinline__ T get(int i) const { return {static_cast<u16>(word >> i * 16)}; }
};
template <class T>
struct ElementPair<T, 4> {
    u64 word;
//% if early
    __device__ __forceinline__ static ElementPair of(T low, T high) {
        return {__float_as_uint(low) | static_cast<u64>(__float_as_uint(high)) << 32};
    }
//% endif
    __device__ __forceinline__ T get(int i) const { return __uint_as_float(static_cast<u32>(word >> i * 32)); }
};

template <class T>
struct ScoreTensor {
    const T* first;
    i64 batch_step, head_step;
    int query_step, key_step, len_q, len_kv;
//% if packed
    int row_keys;        // of a row in memory; len_q and len_kv count those of the sequence that are there
//% endif
    const T* of_row[2];  // of the heads of a lane's rows lane/4 and lane/4 + 8
//% if early
    ElementPair<T> ahead[2][kGroupKv / 8];  // of the fragment that comes next
//% endif

    __device__ __forceinline__ void load_heads(int batch, int first_head, int second_head) {
        const T* of_batch = first + batch * batch_step;
        of_row[0] = of_batch + first_head * head_step, of_row[1] = of_batch + second_head * head_step;
    }
//% if packed
    __device__ __forceinline__ T at(int query, int key) const {
        if (query >= len_q || key >= len_kv) return {};
        return of_row[0][static_cast<i64>(query) * query_step + static_cast<i64>(key) * key_step];
    }
//% else
    // Of a query and a key; of the last ones for those past the end, which others hide.
    __device__ __forceinline__ T at(int query, int key) const {
        return of_row[0][static_cast<i64>(min(query, len_q - 1)) * query_step + static_cast<i64>(min(key, len_kv - 1)) * key_step];
    }
//% endif
//% if early
    // Loads the elements of a fragment, so that they are here once its scores are. There are none behind the last key.
    template <int kTiles, class Position>
    __device__ __forceinline__ void load_ahead(const Position& position) {
        const int column = position.first_column + lane_index() % 4 * 2, columns = len_kv - column;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i64 row = min(position.row(0, h), len_q - 1);
            const T* own = of_row[h] + row * query_step + static_cast<i64>(column) * key_step;
            const bool aligned = reinterpret_cast<u64>(own) % sizeof(ElementPair<T>) == 0;
//% if fronts
            if (key_step == 1 && aligned && column >= 0 && columns > kTiles * 8 - 7) {
//% else
            if (key_step == 1 && aligned && columns > kTiles * 8 - 7) {
//% endif
                const auto* pairs = reinterpret_cast<const ElementPair<T>*>(own);
#pragma unroll
                for (int j = 0; j < kTiles; ++j) ahead[h][j] = pairs[j * 4];
                continue;
            }
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
//% if fronts
                // Before the first key there are none, either: a fragment may begin there.
                const T* first = column + j * 8 < 0 ? own + key_step : own;
                const T* second = j * 8 + 1 < columns ? own + key_step : own;
                if (j * 8 < columns && column + j * 8 + 1 >= 0) ahead[h][j] = ElementPair<T>::of(first[0], second[0]);
//% else
                const T* second = j * 8 + 1 < columns ? own + key_step : own;
                if (j * 8 < columns) ahead[h][j] = ElementPair<T>::of(own[0], second[0]);
//% endif
                own += 8 * key_step;
                launder(own);
            }
        }
    }
    // Calls change(s, element) for each score of the fragment whose elements have been loaded.
    template <class Position, int kTiles, class Change>
    __device__ __forceinline__ void for_each(float (&S)[1][kTiles][4], const Position&, const Change& change) const {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
                change(S[0][j][h * 2], ahead[h][j].get(0)), change(S[0][j][h * 2 + 1], ahead[h][j].get(1));
    }
//% else
//% if packed
    // Calls change(s, element) for each score of a fragment.
//% else
    // Calls change(s, element) for each score of a fragment that has an element.
//% endif
    template <class Position, int kRowTiles, int kTiles, class Change>
    __device__ __forceinline__ void for_each(float (&S)[kRowTiles][kTiles][4], const Position& position, const Change& change) const {
        const int row_step = Position::kRowsAreKeys ? key_step : query_step, step = Position::kRowsAreKeys ? query_step : key_step;
//% if packed
        const int rows = Position::kRowsAreKeys ? row_keys : len_q;  // others hide keys past the end
        const int column = position.first_column + lane_index() % 4 * 2;
//% else
        const int rows = Position::kRowsAreKeys ? len_kv : len_q;
        const int column = position.first_column + lane_index() % 4 * 2, columns = (Position::kRowsAreKeys ? len_q : len_kv) - column;
//% endif
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
//% if packed
                const i64 row = position.row(i, h) < rows ? position.row(i, h) : 0;
                const int columns = position.row(i, h) < rows ? (Position::kRowsAreKeys ? len_q : row_keys) - column : 0;
//% else
                const i64 row = min(position.row(i, h), rows - 1);
//% endif
                const T* own = of_row[Position::kTwoHeads * h] + row * row_step + static_cast<i64>(column) * step;
                const bool aligned = reinterpret_cast<u64>(own) % sizeof(ElementPair<T>) == 0;
                if (!Position::kRowsAreKeys && step == 1 && aligned && columns > kTiles * 8 - 7) {
                    const auto* pairs = reinterpret_cast<const ElementPair<T>*>(own);
#pragma unroll
                    for (int j = 0; j < kTiles; ++j) {
                        const ElementPair<T> pair = pairs[j * 4];
                        change(S[i][j][h * 2], pair.get(0)), change(S[i][j][h * 2 + 1], pair.get(1));
                    }
                    continue;
                }
#pragma unroll
                for (int j = 0; j < kTiles; ++j) {
//% if packed
                    change(S[i][j][h * 2], j * 8 < columns ? own[0] : T{});
                    change(S[i][j][h * 2 + 1], j * 8 + 1 < columns ? own[step] : T{});
//% else
                    if (j * 8 < columns) change(S[i][j][h * 2], own[0]);
                    if (j * 8 + 1 < columns) change(S[i][j][h * 2 + 1], own[step]);
//% endif
                    own += 8 * step;
                    launder(own);  // else the compiler would keep the distances of all columns in registers
                }
            }
    }
//% endif
};
