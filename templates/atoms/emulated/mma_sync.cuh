// Warp-wide matrix product d += a * b, 16x16 times 16x8: the fragment map is that of atoms/ptx/mma_sync.cuh. Products of 16-bit elements
// are exact in fp32; they are added up in double and rounded once.

namespace emulator {

struct MmaOperand {
    float* d;
    const u32* a;
    u32 b0, b1;
};

template <class Element>
inline void mma_m16n8k16(MmaOperand** lanes) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < kLanes; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + half + i / 2 * 8] = half_of<Element>(lanes[lane]->a[i], half);
            b[2 * t + half][g] = half_of<Element>(lanes[lane]->b0, half);
            b[2 * t + half + 8][g] = half_of<Element>(lanes[lane]->b1, half);
        }
    }
    for (int lane = 0; lane < kLanes; ++lane)
        for (int e = 0; e < 4; ++e) {
            const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
            double total = lanes[lane]->d[e];
            for (int k = 0; k < 16; ++k) total += static_cast<double>(a[row][k]) * b[k][column];
            lanes[lane]->d[e] = static_cast<float>(total);
        }
}

}  // namespace emulator

template <class Element>
inline void mma_sync_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulator::MmaOperand own{d, a, b0, b1};
    emulator::current->meet("mma_sync_m16n8k16", own, emulator::mma_m16n8k16<Element>);
}
