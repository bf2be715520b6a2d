// The product of a warp (atoms/emulated/mma_sync.cuh).

namespace emulator {

template <class Element>
void mma_m16n8k16(MmaOperand** lanes) {
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

template void mma_m16n8k16<Bf16>(MmaOperand**);
template void mma_m16n8k16<Fp16>(MmaOperand**);

}  // namespace emulator
