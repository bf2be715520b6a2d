// Conversion of two fp32 values to a pair of 16-bit elements, to nearest even.

namespace emulator {

inline u16 bits_of(float x, Bf16) {
    const u32 bits = bits_as<u32>(x);
    if (x != x) return 0x7fff;  // the NaN that cvt gives
    return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline u16 bits_of(float x, Fp16) {
    const u32 bits = bits_as<u32>(x), sign = bits >> 16 & 0x8000u;
    if (x != x) return 0x7fff;
    const float magnitude = std::fabs(x);
    if (magnitude >= 65520.0f) return static_cast<u16>(sign | 0x7c00u);
    if (magnitude < 6.103515625e-5f)  // below 2^-14: multiples of 2^-24, rounded to even by fp32's own rounding of 2^-1 + x
        return static_cast<u16>(sign | (bits_as<u32>(magnitude + 0.5f) - bits_as<u32>(0.5f)));
    const u32 rounded = (bits & 0x7fffffffu) + 0xfffu + (bits >> 13 & 1);
    return static_cast<u16>(sign | ((rounded >> 13) - (112u << 10)));
}

}  // namespace emulator

// `low` goes to the low half of the result.
template <class Element>
inline u32 cvt_rn_x2(float low, float high) {
    return emulator::bits_of(low, Element{}) | static_cast<u32>(emulator::bits_of(high, Element{})) << 16;
}
