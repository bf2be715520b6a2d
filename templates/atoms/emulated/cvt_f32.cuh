// Conversion of a pair of 16-bit elements to two fp32 values, which is exact.

// `low` comes from the low half of the pair.
template <class Element>
inline void cvt_f32_x2(float& low, float& high, u32 pair) {
    low = emulator::half_of<Element>(pair, 0);
    high = emulator::half_of<Element>(pair, 1);
}
