// The parts of CUDA C++ that kernels and tile files use, for a C++ compiler: qualifiers, vector types, bit casts, min and max.
// Nothing here knows of threads or shared memory: those are atoms.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct alignas(16) uint4 {
    unsigned int x, y, z, w;

#ifdef FLASHGEN_TRACED  // the compiler's calls (trace.cuh) leave out a function's result that is stored whole
    uint4& operator=(const uint4& from) { return x = from.x, y = from.y, z = from.z, w = from.w, *this; }
#endif
};

template <class To, class From>
inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}
inline int __float_as_int(float value) { return bits_as<int>(value); }
inline unsigned int __float_as_uint(float value) { return bits_as<unsigned int>(value); }
inline float __int_as_float(int value) { return bits_as<float>(value); }
inline float __uint_as_float(unsigned int value) { return bits_as<float>(value); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }  // else these would become ints without a word
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned int max(unsigned int a, unsigned int b) { return a > b ? a : b; }
using std::fmaf;
using std::fmaxf;
