// dK and dV where the warps of a block divide the queries: each has a part of every number, the sum over its own queries.

// Adds up the parts of all warps, rounds the sum times `scale`, and writes it to the tile. Each warp does so for some pairs of neighbouring
// columns, in the order of the warps: the sum is the same in every run. `memory`, which nobody reads any more, takes the parts in fp32.
template <class Element, int kWarps, class Tile, int kRowTiles, int kTiles>
__device__ __forceinline__ void add_up_parts(const Tile& tile, const float (&part)[kRowTiles][kTiles][4], SharedAddress memory,
                                             float scale) {
    constexpr int kNumbers = kRowTiles * kTiles * 4;  // of a lane
    const SharedAddress own = memory + lane_index() * 4;
#pragma unroll
    for (int n = 0; n < kNumbers; ++n)
        store_shared(own + (warp_index() * kNumbers + n) * 128, __float_as_uint(part[n / 4 / kTiles][n / 4 % kTiles][n % 4]));
    barrier_sync();  // the parts of all warps are here
    for (int n = warp_index() * 2; n < kNumbers; n += kWarps * 2) {
        float total[2] = {};
        for (int warp = 0; warp < kWarps; ++warp)
            for (int e = 0; e < 2; ++e) total[e] += __uint_as_float(load_shared(own + (warp * kNumbers + n + e) * 128));
        const int row = n / 4 / kTiles * 16 + n / 2 % 2 * 8 + lane_index() / 4;
        store_shared(tile.at(row, n / 4 % kTiles) + lane_index() % 4 * 4, cvt_rn_x2<Element>(total[0] * scale, total[1] * scale));
    }
}
