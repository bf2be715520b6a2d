// Fixed-width integers and element types: see atoms/ptx/types.cuh. And the values of elements, which products need.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct Bf16 { u16 bits; };
struct Fp16 { u16 bits; };
struct E4m3Pair { u16 bits; };  // two numbers, the first in the low half

inline float infinity() { return __uint_as_float(0x7f800000u); }

namespace emulator {

inline float value_of(Bf16 x) { return bits_as<float>(static_cast<u32>(x.bits) << 16); }
inline float value_of(Fp16 x) {
    const u32 sign = static_cast<u32>(x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023u;
    if (exponent == 31) return bits_as<float>(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return bits_as<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}
template <class Element>
inline float half_of(u32 pair, int half) { return value_of(Element{static_cast<u16>(pair >> half * 16)}); }

}  // namespace emulator
