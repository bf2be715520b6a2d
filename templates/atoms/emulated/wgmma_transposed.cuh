// Products of a warpgroup with MN-major operands: see atoms/ptx/wgmma_transposed.cuh.

template <class Element, int kN>
inline void wgmma_ss_trans_a(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate) {
    emulator::WgmmaOperand own{&d[0][0], nullptr, a, b, accumulate, true, false};
    emulator::issue<Element, kN>("wgmma_ss_trans_a", own);
}

template <class Element, int kN>
inline void wgmma_ss_trans_b(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate) {
    emulator::WgmmaOperand own{&d[0][0], nullptr, a, b, accumulate, false, true};
    emulator::issue<Element, kN>("wgmma_ss_trans_b", own);
}

template <class Element, int kN>
inline void wgmma_ss_trans_ab(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate) {
    emulator::WgmmaOperand own{&d[0][0], nullptr, a, b, accumulate, true, true};
    emulator::issue<Element, kN>("wgmma_ss_trans_ab", own);
}
