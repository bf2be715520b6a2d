// Comparison of two pairs of fp16 numbers.

namespace emulator {

inline bool is_less_fp16(u32 a, u32 b) {
    const auto is_nan = [](u32 bits) { return (bits & 0x7fffu) > 0x7c00u; };
    const auto in_order = [](u32 bits) {  // a whole number in the order of these numbers, where 0 and -0 are the same
        const int magnitude = static_cast<int>(bits & 0x7fffu);
        return bits & 0x8000u ? -magnitude : magnitude;
    };
    return !is_nan(a) && !is_nan(b) && in_order(a) < in_order(b);
}

}  // namespace emulator

// In each half of the result all bits are set where that half of a is less than that of b, and none where it is not, or one is NaN.
inline u32 set_lt_f16x2(u32 a, u32 b) {
    const bool low = emulator::is_less_fp16(a & 0xffff, b & 0xffff), high = emulator::is_less_fp16(a >> 16, b >> 16);
    return (low ? 0x0000ffffu : 0) | (high ? 0xffff0000u : 0);
}
