// Fixed-width integers and element types. NVRTC brings no headers, so neither <cstdint> nor <cuda_bf16.h> is there.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct Bf16 { u16 bits; };
struct Fp16 { u16 bits; };
struct E4m3Pair { u16 bits; };  // two numbers, the first in the low half

// A function: NVRTC has no constant expression for infinity without headers.
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
