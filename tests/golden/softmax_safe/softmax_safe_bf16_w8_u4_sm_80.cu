// softmax_safe_bf16_w8_u4_sm_80
//
// Softmax of rows in three passes, of which each reads x: maximum, sum, division. The maximum comes off before the exponential, so that
// nothing overflows.
//
//   problem  softmax_bf16
//   config   warps 8, unroll 4
//   target   sm_80
//   launch   <<<ceil(rows / rows of a block), 256, 64 bytes>>>
//   parts    atoms/ptx: types, index, shared_memory, barrier, cvt, cvt_f32, ex2, mul, shfl_sync
//            tile/common: shared_regions, tile_scheduler, softmax_rows, element_16bit
//            tile/warp: row_slice, matrix_row

// ==== atoms/ptx/types.cuh ============================================================================================

// Fixed-width integers and element types. NVRTC brings no headers, so neither <cstdint> nor <cuda_bf16.h> is there.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct Bf16 { u16 bits; };
struct Fp16 { u16 bits; };

// A function: NVRTC has no constant expression for infinity without headers.
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// ==== atoms/ptx/index.cuh ============================================================================================

// Who a thread is. PTX ISA, "Special Registers": %tid, %ctaid.

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }

__device__ __forceinline__ int block_index() { return static_cast<int>(blockIdx.x); }

__device__ __forceinline__ int lane_index() { return thread_index() % 32; }

// The same for all lanes of a warp, which call this together. The shuffle tells the compiler so, which lets it keep what follows in uniform
// registers.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffff, thread_index() / 32, 0); }

// ==== atoms/ptx/shared_memory.cuh ====================================================================================

// Shared memory: where it begins, and ordinary reads and writes of it. PTX ISA, "ld", "st", "cvta".

using SharedAddress = u32;  // byte address in the shared window

// The block's dynamic shared memory, aligned to 1024 bytes. The only shared variable of a kernel.
__device__ __forceinline__ SharedAddress shared_memory() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return static_cast<SharedAddress>(__cvta_generic_to_shared(memory));
}

// Hooks of the emulator that runs these kernels on a CPU: bytes after each region that nobody may touch. On a GPU they do nothing.
constexpr u32 kRedZone = 0;
__device__ __forceinline__ void claim_region(SharedAddress, int) {}

__device__ __forceinline__ u32 load_shared(SharedAddress address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_shared(SharedAddress address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// ==== atoms/ptx/barrier.cuh ==========================================================================================

// Barriers. PTX ISA, "bar, barrier" and "bar.warp.sync".

// All threads of the block arrive; what they wrote to shared memory before is visible to all of them after.
__device__ __forceinline__ void barrier_sync() { __syncthreads(); }

// ==== atoms/ptx/cvt.cuh ==============================================================================================

// Conversion of two fp32 values to a pair of 16-bit elements, to nearest even. PTX ISA, "cvt" (.bf16x2: sm_80).

// `low` goes to the low half of the result.
template <class Element>
__device__ __forceinline__ u32 cvt_rn_x2(float low, float high);

template <>
__device__ __forceinline__ u32 cvt_rn_x2<Bf16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

template <>
__device__ __forceinline__ u32 cvt_rn_x2<Fp16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// ==== atoms/ptx/cvt_f32.cuh ==========================================================================================

// Conversion of a pair of 16-bit elements to two fp32 values, which is exact. PTX ISA, "cvt".

// `low` comes from the low half of the pair.
template <class Element>
__device__ __forceinline__ void cvt_f32_x2(float& low, float& high, u32 pair);

template <>
__device__ __forceinline__ void cvt_f32_x2<Bf16>(float& low, float& high, u32 pair) {  // bf16 is the upper half of fp32
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
}

template <>
__device__ __forceinline__ void cvt_f32_x2<Fp16>(float& low, float& high, u32 pair) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}" : "=f"(low), "=f"(high) : "r"(pair));
}

// ==== atoms/ptx/ex2.cuh ==============================================================================================

// Powers of 2. PTX ISA, "ex2" (error below 2 ulp; ex2(-inf) = +0).

__device__ __forceinline__ float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ==== atoms/ptx/mul.cuh ==============================================================================================

// Products. PTX ISA, "mul".

// The upper 64 of the product's 128 bits.
__device__ __forceinline__ u64 mul_hi(u64 a, u64 b) { return __umul64hi(a, b); }

// ==== atoms/ptx/shfl_sync.cuh ========================================================================================

// Exchange of registers between the lanes of a warp. PTX ISA, "shfl.sync".

// The value of lane (own lane xor `lane_mask`). All 32 lanes take part.
__device__ __forceinline__ float shfl_sync_bfly(float value, int lane_mask) {
    return __shfl_xor_sync(0xffffffff, value, lane_mask);
}
__device__ __forceinline__ u32 shfl_sync_bfly(u32 value, int lane_mask) { return __shfl_xor_sync(0xffffffff, value, lane_mask); }

using Element = Bf16;

// ---- what this kernel is specialised for ------------------------------------------------------------------------------

constexpr int kWarps = 8, kUnroll = 4;
constexpr int kThreads = kWarps * 32, kBlocksPerSm = 1024 / kThreads;

// x and y are [batch, heads_q, len_q, columns], with strides in elements. rows: batch * heads_q * len_q. row_warps: warps that share a row,
// a power of two. x_reciprocal: for a division by x (see divide).
struct Parameters {
    const Element* x;
    Element* y;
    i64 x_batch;
    i64 x_head;
    i64 x_row;
    i64 y_batch;
    i64 y_head;
    i64 y_row;
    u64 len_q_reciprocal;
    u64 heads_q_reciprocal;
    int rows;
    int columns;
    int len_q;
    int heads_q;
    int row_warps;
};

// ---- tile operations --------------------------------------------------------------------------------------------------

// ==== tile/common/shared_regions.cuh =================================================================================

// How a kernel divides its shared memory: regions one after the other. Together they take just what the launch gives the block.

struct SharedRegions {
    SharedAddress next;

    __device__ __forceinline__ SharedRegions() : next(shared_memory()) {}

    // The address of a new region. Regions that need an alignment come before those whose `bytes` are no multiple of it.
    __device__ __forceinline__ SharedAddress take(int bytes) {
        const SharedAddress region = next;
        next += bytes + kRedZone;
        claim_region(region, bytes);
        return region;
    }
};

// ==== tile/common/tile_scheduler.cuh =================================================================================

// The tile scheduler: from a block's index, or that of a claimed tile, to its work tile.

// n / divisor, for n >= 0, given `reciprocal` = ceil(2^64 / divisor), or 0 for a divisor of 1 (Lemire, Kaser and Kurz 2019: exact for 32
// bits).
__device__ __forceinline__ int divide(int n, u64 reciprocal) { return reciprocal == 0 ? n : static_cast<int>(mul_hi(n, reciprocal)); }

// ==== tile/common/softmax_rows.cuh ===================================================================================

// What kernels share of softmax's rows: their origin, and in online softmax the running row max, and reductions over the quad of lanes that
// holds a row of S.

// The factor that normalises a row of O: 1 / total, to 1 ulp, or 0 if no key is seen. `total` is 0, NaN or from about 1 to below 2^100.
// Newton's method refines a guess good to 5 %, three times: a division would bring a branch, and rcp.approx differs between GPUs.
__device__ __forceinline__ float normaliser(float total) {
    float y = __int_as_float(0x7ef311c3 - __float_as_int(total));  // negates the exponent: 254 << 23, less what makes the error least
#pragma unroll
    for (int i = 0; i < 3; ++i) y = fmaf(y, fmaf(-total, y, 1.0f), y);
    return total == 0.0f ? 0.0f : y;
}

// ==== tile/warp/row_slice.cuh ========================================================================================

// A row of S, or a slice of one that is longer, in the registers of the warps that share the row; and what they find out together.

struct Maximum {
    static __device__ __forceinline__ float nothing() { return -infinity(); }
    static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};
struct Sum {
    static __device__ __forceinline__ float nothing() { return 0.0f; }
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

template <class Combine>
__device__ __forceinline__ float reduce_warp(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value = Combine::of(value, shfl_sync_bfly(value, distance));
    return value;
}

// Combines the values of all lanes of a row's `row_warps` warps, which are neighbours. All threads of the block take part. `partial` is
// shared memory for a word of each warp, which serves one reduction only.
template <class Combine>
__device__ __forceinline__ float reduce_row(float value, SharedAddress partial, int warp, int row_warp, int row_warps) {
    value = reduce_warp<Combine>(value);
    if (row_warps == 1) return value;
    if (lane_index() == 0) store_shared(partial + warp * 4, __float_as_uint(value));
    barrier_sync();
    const SharedAddress of_row = partial + (warp - row_warp) * 4;
    return reduce_warp<Combine>(lane_index() < row_warps ? __uint_as_float(load_shared(of_row + lane_index() * 4)) : Combine::nothing());
}

// ==== tile/common/element_16bit.cuh ==================================================================================

// Single 16-bit elements as fp32 numbers.

__device__ __forceinline__ float load_element(const Element* at) {
    float value, nothing;
    cvt_f32_x2<Element>(value, nothing, at->bits);
    return value;
}
__device__ __forceinline__ void store_element(Element* at, float value) { at->bits = static_cast<u16>(cvt_rn_x2<Element>(value, 0.0f)); }

// ==== tile/warp/matrix_row.cuh =======================================================================================

// Which row of a matrix a warp works on, and the exponential of a softmax.

// A row belongs to `row_warps` neighbouring warps of a block, a power of two. This lane has the columns from `first` on, `step` apart:
// neighbouring lanes read neighbouring columns. A row that is not there has no columns.
struct MatrixRow {
    const Element* x;
    Element* y;
    int columns, first, step, warp, row_warp, row_warps;

    template <int kWarps>
    __device__ __forceinline__ static MatrixRow of(const Parameters& p) {
        const int warp = warp_index(), row_warp = warp % p.row_warps;
        const int row = block_index() * (kWarps / p.row_warps) + warp / p.row_warps;
        const int head_and_batch = divide(row, p.len_q_reciprocal), query = row - head_and_batch * p.len_q;
        const int batch = divide(head_and_batch, p.heads_q_reciprocal), head = head_and_batch - batch * p.heads_q;
        return {p.x + batch * p.x_batch + head * p.x_head + query * p.x_row,
                p.y + batch * p.y_batch + head * p.y_head + query * p.y_row,
                row < p.rows ? p.columns : 0,
                row_warp * 32 + lane_index(),
                p.row_warps * 32,
                warp,
                row_warp,
                p.row_warps};
    }

    __device__ __forceinline__ float load(int column) const { return load_element(x + column); }
    __device__ __forceinline__ void store(int column, float value) const { store_element(y + column, value); }
    // Combines the lanes' values of this row. `partial`: see reduce_row.
    template <class Combine>
    __device__ __forceinline__ float reduce(float value, SharedAddress partial) const {
        return reduce_row<Combine>(value, partial, warp, row_warp, row_warps);
    }
};

// exp(x - row_max). Of a row of -inf it is 0: -inf - (-inf) would be NaN.
__device__ __forceinline__ float exponential(float x, float row_max) {
    constexpr float kLog2E = 1.44269504f;
    return ex2_approx_ftz((x - (row_max == -infinity() ? 0.0f : row_max)) * kLog2E);
}

// ---- the kernel -------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
softmax_safe_bf16_w8_u4_sm_80(const __grid_constant__ Parameters p) {
    SharedRegions regions;
    const SharedAddress maxima = regions.take(kWarps * 4), sums = regions.take(kWarps * 4);
    const MatrixRow row = MatrixRow::of<kWarps>(p);

    // First pass: m = max(x).
    float row_max = -infinity();
#pragma unroll kUnroll
    for (int column = row.first; column < row.columns; column += row.step) row_max = fmaxf(row_max, row.load(column));
    row_max = row.reduce<Maximum>(row_max, maxima);

    // Second pass: l = sum(exp(x - m)).
    float row_sum = 0.0f;
#pragma unroll kUnroll
    for (int column = row.first; column < row.columns; column += row.step) row_sum += exponential(row.load(column), row_max);
    row_sum = row.reduce<Sum>(row_sum, sums);

    // Third pass: y = exp(x - m) / l.
    const float inverse = normaliser(row_sum);
#pragma unroll kUnroll
    for (int column = row.first; column < row.columns; column += row.step)
        row.store(column, exponential(row.load(column), row_max) * inverse);
}
