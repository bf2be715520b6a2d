// How two key groups of the decode kernel bring their parts of a head together: by way of shared memory the first one adds what the second
// one has, O in the order of registers, so many column tiles at a time, and the statistics.

template <class Traits>
struct KeyGroupExchange {
    using Storage = DecodeStorage<Traits>;
    static constexpr int kFilled = 1, kEmptied = 2, kPair = 2 * 128;  // barriers: the second key group has written; the first one has read
    static constexpr int kOutTiles = Traits::kColumnsV / 8;

    const Storage& smem;
    const bool has_rows;  // whether this warp has any

    // The first key group calls this before its first part: nothing is there that it has not read.
    __device__ __forceinline__ static void begin() { bar_arrive(kEmptied, kPair); }

    __device__ __forceinline__ void store(const float (&O)[kOutTiles][4], const PairStatistics& own) const {
#pragma unroll
        for (int first = 0; first < kOutTiles; first += Storage::kHandedTiles) {
            bar_sync(kEmptied, kPair);
            if (first == 0) own.store(smem.statistics);
            if (has_rows) {
#pragma unroll
                for (int j = first; j < min(first + Storage::kHandedTiles, kOutTiles); ++j)
                    store_shared_v4(handed(j - first), {__float_as_uint(O[j][0]), __float_as_uint(O[j][1]), __float_as_uint(O[j][2]),
                                                        __float_as_uint(O[j][3])});
            }
            bar_arrive(kFilled, kPair);
        }
    }
    __device__ __forceinline__ void add(float (&O)[kOutTiles][4], float (&totals)[2], Origin (&origins)[2], float scale_log2) const {
        float factors[2][2];
#pragma unroll
        for (int first = 0; first < kOutTiles; first += Storage::kHandedTiles) {
            bar_sync(kFilled, kPair);
            if (first == 0) {
                const uint4 v = load_shared_v4(smem.statistics + (thread_index() / 32 % 4 * 8 + lane_index() / 4) * 16);
                const RowStatistics other[2] = {{__uint_as_float(v.x), __uint_as_float(v.y)}, {__uint_as_float(v.z), __uint_as_float(v.w)}};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const CommonOrigin common = CommonOrigin::of(origins[h], other[h].origin(), scale_log2);
                    totals[h] = common.total(totals[h], fabsf(other[h].total));
                    origins[h] = common.origin;
                    factors[h][0] = common.factors[0], factors[h][1] = common.factors[1];
                }
            }
            if (has_rows) {
#pragma unroll
                for (int j = first; j < min(first + Storage::kHandedTiles, kOutTiles); ++j) {
                    const uint4 v = load_shared_v4(handed(j - first));
                    const u32 given[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int e = 0; e < 4; ++e) O[j][e] = O[j][e] * factors[e / 2][0] + __uint_as_float(given[e]) * factors[e / 2][1];
                }
            }
            bar_arrive(kEmptied, kPair);
        }
    }

  private:
    __device__ __forceinline__ SharedAddress handed(int tile) const { return smem.handed + (tile * 128 + thread_index() % 128) * 16; }
};
