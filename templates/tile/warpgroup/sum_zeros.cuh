// Zeros of the sums of dQ, written while consumers compute: of all heads but the first ones, which the preprocess kernel zeroes. Whoever
// hands out a work tile writes its share of the zeros of a head that comes some heads later.
//
// p.d_q_progress counts from zeroed_counters on, for each key/value head, the work tiles whose share is there. Nobody waits for ever: a
// work tile waits for those of earlier heads alone, which were claimed before it, and whose shares wait for no zeros once they are handed
// out.

template <class Gradient, int kBlockKv>
struct SumZeros {
    static constexpr int kBytes = 4096, kAtOnce = 4;  // copies under way: those of Q and dO do not wait for more
    SharedAddress zeros;

    // By one thread.
    __device__ __forceinline__ void initialise() const {
#pragma unroll 1
        for (int i = 0; i < kBytes; i += 16) store_shared_v4(zeros + i, {0, 0, 0, 0});
        fence_proxy_async();
    }
    // By one thread, before it hands out a work tile: waits for the zeros that this adds to.
    template <class Parameters>
    __device__ __forceinline__ static void wait_for(const Parameters& p, const KeyWork& work) {
        const int head_kv = work.batch * p.heads_kv + work.head_kv;
        if (head_kv < p.zeroed_heads) return;
        while (ld_acquire_gpu(p.d_q_progress + p.zeroed_counters + head_kv) != p.key_tiles) {}
    }
    // By the same thread, once it has handed it out.
    template <class Parameters>
    __device__ __forceinline__ void write_share(const Parameters& p, const KeyWork& work) const {
        const int head_kv = work.batch * p.heads_kv + work.head_kv + p.zeroed_heads, head_tiles = p.group * p.query_tiles;
        if (static_cast<i64>(head_kv) * head_tiles >= p.sum_tiles) return;
        const int begin = work.first_key / kBlockKv * p.zeroed_share, end = min(begin + p.zeroed_share, head_tiles);
        float* to = p.d_q_sum + (static_cast<i64>(head_kv) * head_tiles + begin) * Gradient::kFloats;
#pragma unroll 1
        for (i64 left = static_cast<i64>(end - begin) * (Gradient::kFloats * 4); left > 0; left -= kBytes, to += kBytes / 4) {
            cp_async_bulk_store(to, zeros, static_cast<u32>(min(left, static_cast<i64>(kBytes))));
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_group<kAtOnce - 1>();
        }
        cp_async_bulk_wait_group<0>();
        atom_add_acq_rel_gpu(p.d_q_progress + p.zeroed_counters + head_kv, 1);
    }
};
