// Products of a warpgroup with MN-major operands: see atoms/ptx/wgmma_transposed.cuh.

template <class Element, int kN>
inline void wgmma_ss_trans_a(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate) {
    emulator::issue<Element, kN>("wgmma_ss_trans_a", {&d[0][0], nullptr, a, b, accumulate, true, false});
}

template <class Element, int kN>
inline void wgmma_ss_trans_b(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate) {
    emulator::issue<Element, kN>("wgmma_ss_trans_b", {&d[0][0], nullptr, a, b, accumulate, false, true});
}

template <class Element, int kN>
inline void wgmma_ss_trans_ab(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate) {
    emulator::issue<Element, kN>("wgmma_ss_trans_ab", {&d[0][0], nullptr, a, b, accumulate, true, true});
}
