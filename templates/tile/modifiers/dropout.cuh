// Dropout: P keeps an element with a probability of 1 - p, and is divided by that. Which elements those are follows from the seed, the
// head, the query and the key alone: so the backward pass drops the same ones, whatever the tiles of a kernel.
//
// Random bits are those of Philox4x32 with 7 rounds (Salmon et al. 2011), the fewest that pass all of TestU01. A call has 16 of them for
// each of 8 elements: of the queries i and i + 8 of 16 that are aligned, and the keys j, j + 1, j + 8 and j + 9 of 16. A lane has all 8 in
// its fragment of P. Of P^T two lanes share two calls.

struct RandomWords {
    u32 word[4];  // word n: of query i + n % 2 * 8 and keys j + n / 2 * 8, in its low half, and the next one
};

struct Dropout {
    u32 seed[2];           // the same in the whole warp
    u32 head;              // among those of all entries of the batch
    u32 limits, inverted;  // two limits, the same, below which 16 bits are those of an element to be dropped; all bits: .. to be kept
    float scale;           // 1 / (1 - p); 0 where p is 1

    template <class Parameters>
    __device__ __forceinline__ static Dropout of(const Parameters& p, int batch, int head) {
        const u32 of_all = static_cast<u32>(batch * p.dropout_heads + head);
        // That the compiler knows that all lanes have one seed spares it many additions of the rounds' keys.
        const u32 low = shfl_sync_first(p.dropout_seed[0]), high = shfl_sync_first(p.dropout_seed[1]);
        return {{low, high}, of_all, static_cast<u32>(p.dropout_limits), static_cast<u32>(p.dropout_inverted), p.dropout_scale};
    }

    // The call that has the bits of elements of P: of a pair of queries, counted by `queries_of`, and four keys, counted by `keys_of`.
    // `next_heads`: of so many heads behind this one.
    __device__ __forceinline__ RandomWords random(u32 queries, u32 keys, u32 next_heads = 0) const {
        u32 c[4] = {keys, queries, head + next_heads, 0};
        u32 k[2] = {seed[0], seed[1]};
#pragma unroll
        for (int round = 0; round < 7; ++round) {
            const u64 first = static_cast<u64>(c[0]) * 0xd2511f53u, second = static_cast<u64>(c[2]) * 0xcd9e8d57u;
            c[0] = static_cast<u32>(second >> 32) ^ c[1] ^ k[0], c[1] = static_cast<u32>(second);
            c[2] = static_cast<u32>(first >> 32) ^ c[3] ^ k[1], c[3] = static_cast<u32>(first);
            k[0] += 0x9e3779b9u, k[1] += 0xbb67ae85u;
        }
        return {{c[0], c[1], c[2], c[3]}};
    }
    __device__ __forceinline__ static u32 queries_of(u32 query) { return query / 16 * 8 + query % 8; }
    __device__ __forceinline__ static u32 keys_of(u32 key) { return key / 16 * 4 + key % 8 / 2; }
    // All bits of the halves of a word whose elements are kept. As fp16 numbers two of them take one comparison.
    __device__ __forceinline__ u32 kept(u32 word) const { return ~(set_lt_f16x2(word, limits) ^ inverted); }
};

// What an element of P is multiplied by.
__device__ __forceinline__ float keep_factor(const Dropout& dropout, u32 query, u32 key) {
    const RandomWords bits = dropout.random(Dropout::queries_of(query), Dropout::keys_of(key));
    const u32 low = key / 8 % 2 ? bits.word[2] : bits.word[0], high = key / 8 % 2 ? bits.word[3] : bits.word[1];
    const u32 kept = dropout.kept(query / 8 % 2 ? high : low);
    return kept >> key % 2 * 16 & 1 ? dropout.scale : 0.0f;
}

// Zeroes elements of P, of 16 rows and 16 keys of a warp, as an operand of P V. Under PackGQA each query has kPackGqa rows, one for each
// head from that of `dropout` on.
template <int kPackGqa = 1>
__device__ __forceinline__ void drop(u32 (&P)[4], const Dropout& dropout, int first_row, int first_key) {
    const u32 row = first_row + lane_index() / 4, keys = first_key / 4u + lane_index() % 4;
    if constexpr (kPackGqa == 1) {
        const RandomWords bits = dropout.random(first_row / 2u + lane_index() / 4, keys);
#pragma unroll
        for (int i = 0; i < 4; ++i) P[i] &= dropout.kept(bits.word[i]);
    } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 query = (row + h * 8) / kPackGqa;
            const RandomWords bits = dropout.random(Dropout::queries_of(query), keys, (row + h * 8) % kPackGqa);
            P[h] &= dropout.kept(query / 8 % 2 ? bits.word[1] : bits.word[0]);
            P[2 + h] &= dropout.kept(query / 8 % 2 ? bits.word[3] : bits.word[2]);
        }
    }
}

// The same of more keys.
template <int kPackGqa, int kSteps>
__device__ __forceinline__ void drop(u32 (&P)[kSteps][4], const Dropout& dropout, int first_row, int first_key) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) drop<kPackGqa>(P[step], dropout, first_row, first_key + step * 16);
}

// The same of a fragment of P in fp32. Random bits come from a loop that is not unrolled: the compiler would make them all at once, into
// more registers than there are.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void drop(float (&P)[kRowTiles][kTiles][4], const Dropout& dropout, int first_row, int first_key) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int first = 0; first < kTiles; first += 8) {
            u32 kept = 0;  // of 16 keys four neighbouring bits of either half
#pragma unroll 1
            for (int j = first; j < min(first + 8, kTiles); j += 2) {
                u32 all[4] = {0x10001u, 0x20002u, 0x40004u, 0x80008u};
                drop(all, dropout, first_row + i * 16, first_key + j * 8);
                kept |= (all[0] | all[1] | all[2] | all[3]) << (j - first) * 2;
            }
#pragma unroll
            for (int j = first; j < min(first + 8, kTiles); ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if ((kept >> ((j - first) / 2 * 4 + j % 2 * 2 + e / 2 + e % 2 * 16) & 1) == 0) P[i][j][e] = 0.0f;
        }
}

// What is left of P is still to be divided by the probability that it is.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void scale_kept(float (&O)[kRowTiles][kTiles][4], const Dropout& dropout) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) O[i][j][e] *= dropout.scale;
}

// Which elements of a fragment of P^T of a warp are kept, as bits.
template <int kRowTiles, int kTiles>
struct KeptElements {
    static_assert(kTiles % 2 == 0, "two lanes share 16 queries");
    static constexpr int kCalls = kRowTiles * kTiles / 2, kWords = (kCalls + 3) / 4;
    u32 words[kWords];  // the bits of a call are 4 neighbouring ones of either half

    __device__ __forceinline__ bool has(int i, int j, int e) const {
        const int call = i * (kTiles / 2) + j / 2;
        return (words[call / 4] & (1u << (call % 4 * 4 + e + j % 2 * 16))) != 0;
    }

    __device__ __forceinline__ static KeptElements of(const Dropout& dropout, int first_key, int first_query) {
        KeptElements found{};
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
#pragma unroll
            for (int n = 0; n < 4 && word * 4 + n < kCalls; ++n) {
                const int call = word * 4 + n, i = call / (kTiles / 2), j = call % (kTiles / 2) * 2;
                found.words[word] |= of_call(dropout, first_key + i * 16, first_query + j * 8) << n * 4;
            }
        }
        return found;
    }

  private:
    // Of 16 keys and 16 queries.
    __device__ __forceinline__ static u32 of_call(const Dropout& dropout, int first_key, int first_query) {
        const int lane = lane_index();
        const bool odd = lane / 4 % 2;  // whether this lane's keys are
        // A lane with even keys makes the call for its even queries, the next lane with keys the one for odd queries: of each call the one
        // needs the low halves, the other the high halves.
        const RandomWords bits = dropout.random(first_query / 2u + lane % 4 * 2 + odd, first_key / 4u + lane / 8);
        u32 found = 0;
#pragma unroll
        for (int n = 0; n < 2; ++n) {  // of keys n * 8 behind the first
            const u32 low = (bits.word[n * 2] & 0xffff) | bits.word[n * 2 + 1] << 16;
            const u32 high = bits.word[n * 2] >> 16 | (bits.word[n * 2 + 1] & 0xffff0000u);
            const u32 own = dropout.kept(odd ? high : low), other = shfl_sync_bfly(dropout.kept(odd ? low : high), 4);
            found |= (odd ? other : own) & 0x10001u << n * 2;
            found |= (odd ? own : other) & 0x20002u << n * 2;
        }
        return found;
    }
};

// P^T of row tile i without what is dropped, rounded as the operand of dV. `slice`: of 16 queries.
template <class Element, int kRowTiles, int kTiles>
__device__ __forceinline__ void round_kept(u32 (&a)[4], const float (&P)[kRowTiles][kTiles][4], int i, int slice,
                                           const KeptElements<kRowTiles, kTiles>& kept) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int j = slice * 2 + r / 2, e = r % 2 * 2;
        a[r] = cvt_rn_x2<Element>(kept.has(i, j, e) ? P[i][j][e] : 0.0f, kept.has(i, j, e + 1) ? P[i][j][e + 1] : 0.0f);
    }
}

// From the gradient of what is left of P^T to that of P^T.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void drop(float (&dP)[kRowTiles][kTiles][4], const KeptElements<kRowTiles, kTiles>& kept, float scale) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) dP[i][j][e] = kept.has(i, j, e) ? dP[i][j][e] * scale : 0.0f;
}
