// Fixed-width integers and element types: see atoms/ptx/types.cuh.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct Bf16 { u16 bits; };
struct Fp16 { u16 bits; };

inline float infinity() { return __uint_as_float(0x7f800000u); }
