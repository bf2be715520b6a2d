// Conversion of e4m3 numbers to fp16, which is exact, and of fp32 to e4m3.

namespace emulator {

// 1 sign, 4 exponent (bias 7) and 3 mantissa bits; no infinity, and NaN where all bits but the sign are set.
inline u32 fp16_of_e4m3(u32 bits) {
    const u32 sign = (bits & 0x80u) << 8, exponent = bits >> 3 & 15u, mantissa = bits & 7u;
    if (exponent == 15 && mantissa == 7) return 0x7fff;  // the NaN that cvt gives
    if (exponent > 0) return sign | (exponent + 8) << 10 | mantissa << 7;
    if (mantissa == 0) return sign;
    const u32 shift = mantissa >= 4 ? 1 : mantissa >= 2 ? 2 : 3;  // mantissa * 2^-9, which fp16 has as a normal number
    return sign | (9 - shift) << 10 | (mantissa << shift & 7u) << 7;
}

inline u32 e4m3_of(float x) {
    if (x != x) return 0x7f;
    const u32 sign = bits_as<u32>(x) >> 24 & 0x80u;
    const float magnitude = std::fabs(x);
    if (magnitude >= 448.0f) return sign | 0x7e;
    if (magnitude < 0.015625f)  // below 2^-6: multiples of 2^-9, rounded to even by fp32's own rounding of 2^14 + x
        return sign | (bits_as<u32>(magnitude + 16384.0f) - bits_as<u32>(16384.0f));
    const u32 bits = bits_as<u32>(magnitude);
    return sign | ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3);
}

}  // namespace emulator

// Four at once: pairs[0] has those of the low half of `four`, pairs[1] those of the high half, and the lower byte's is in the low half of a
// pair.
inline void cvt_f16x2_e4m3x2(u32 (&pairs)[2], u32 four) {
    for (int i = 0; i < 2; ++i) {
        const u32 two = four >> i * 16;
        pairs[i] = emulator::fp16_of_e4m3(two & 255u) | emulator::fp16_of_e4m3(two >> 8 & 255u) << 16;
    }
}

// Two fp32 numbers to nearest even; what is beyond the largest one, 448, becomes that. `low` goes to the low byte of the result.
inline u32 cvt_rn_satfinite_e4m3x2(float low, float high) { return emulator::e4m3_of(low) | emulator::e4m3_of(high) << 8; }
