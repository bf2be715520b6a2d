// Rotary position embedding (Su et al. 2021, "RoFormer"): pairs of columns are rotated by angles that grow with the row's position.

// A chunk is 8 neighbouring elements of a row, 16 bytes that begin at a multiple of 16.
struct Chunk {
    u32 pairs[4];

    __device__ __forceinline__ static Chunk load(const void* at) {
        const uint4 v = *reinterpret_cast<const uint4*>(at);
        return {{v.x, v.y, v.z, v.w}};
    }
    __device__ __forceinline__ void store(void* at) const { *reinterpret_cast<uint4*>(at) = {pairs[0], pairs[1], pairs[2], pairs[3]}; }
    __device__ __forceinline__ void unpack(float (&x)[8]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) cvt_f32_x2<Element>(x[2 * i], x[2 * i + 1], pairs[i]);
    }
};

// A table of cosines or sines, a row for each position; the one in fp32 is taken where both are there.
struct RotaryTable {
    const Element* elements;
    const float* fp32;

    __device__ __forceinline__ bool is_there() const { return elements != nullptr || fp32 != nullptr; }
    __device__ __forceinline__ float load(i64 at) const { return fp32 != nullptr ? fp32[at] : load_element(elements + at); }
    // 8 neighbours, at a multiple of 8.
    __device__ __forceinline__ void load_chunk(float (&x)[8], i64 at) const {
        if (fp32 == nullptr) return Chunk::load(elements + at).unpack(x);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Chunk four = Chunk::load(fp32 + at + i * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[i * 4 + j] = __uint_as_float(four.pairs[j]);
        }
    }
};

// Of the columns of a chunk: x becomes x * cosine + other * sine, where other is the column that x is a pair with.
struct RotaryAngles {
    float cosine[8], sine[8];
};

// The first `columns` columns are rotated, an even number: columns 2 j and 2 j + 1 as a pair (GPT-J), or j and j + columns / 2 (GPT-NeoX).
struct Rotary {
    RotaryTable cosines, sines;
    int columns, positions;  // rows of the tables
    bool interleaved;

    __device__ __forceinline__ static Rotary of(const Parameters& p) {
        const RotaryTable cosines{p.rotary_cos, p.rotary_cos_fp32}, sines{p.rotary_sin, p.rotary_sin_fp32};
        return {cosines, sines, p.rotary_dim, p.rotary_positions, p.rotary_interleaved != 0};
    }

    // Whether the chunk from column `first` on has columns that are rotated.
    __device__ __forceinline__ bool rotates(int first) const { return first < columns && cosines.is_there(); }
    // Whether all columns of any chunk that is rotated have their others in one chunk, in the same order.
    __device__ __forceinline__ bool in_chunks() const { return !interleaved && columns % 16 == 0; }

    // What the columns of a chunk of `row` are pairs with. Beyond the last column that is rotated it means nothing.
    __device__ __forceinline__ Chunk others(const Chunk& own, const Element* row, int first) const {
        const int half = columns / 2;
        if (in_chunks()) return Chunk::load(row + (first < half ? first + half : first - half));
        Chunk found;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 other[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = min(first + 2 * i + j, columns - 1);
                other[j] = interleaved ? 0 : row[column < half ? column + half : column - half].bits;
            }
            found.pairs[i] = interleaved ? own.pairs[i] << 16 | own.pairs[i] >> 16 : other[0] | other[1] << 16;
        }
        return found;
    }

    // For a row at this position.
    __device__ __forceinline__ RotaryAngles angles(int first, i64 position) const {
        const int half = columns / 2;
        const i64 row = min(position, i64{positions} - 1) * half;
        RotaryAngles found;
        if (in_chunks()) {
            const i64 at = row + (first < half ? first : first - half);
            cosines.load_chunk(found.cosine, at);
            sines.load_chunk(found.sine, at);
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int column = min(first + e, columns - 1);
            if (!in_chunks()) {
                const i64 at = row + (interleaved ? column / 2 : column < half ? column : column - half);
                found.cosine[e] = cosines.load(at);
                found.sine[e] = sines.load(at);
            }
            const bool is_second = interleaved ? e % 2 == 1 : column >= half;
            if (!is_second) found.sine[e] = -found.sine[e];
        }
        return found;
    }

    // Rotates a chunk. What is not rotated keeps its bits.
    __device__ __forceinline__ void rotate(Chunk& chunk, const Chunk& other, int first, const RotaryAngles& angles) const {
        float x[8], y[8];
        chunk.unpack(x);
        other.unpack(y);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = x[e] * angles.cosine[e] + y[e] * angles.sine[e];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + 2 * i < columns) chunk.pairs[i] = cvt_rn_x2<Element>(x[2 * i], x[2 * i + 1]);
    }
};
