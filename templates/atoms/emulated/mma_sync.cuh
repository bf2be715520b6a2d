// Warp-wide matrix product d += a * b, 16x16 times 16x8: the fragment map is that of atoms/ptx/mma_sync.cuh. Products of 16-bit elements
// are exact in fp32; they are added up in double and rounded once.

namespace emulator {

struct MmaOperand {
    float* d;
    const u32* a;
    u32 b0, b1;
};

template <class Element>
void mma_m16n8k16(MmaOperand** lanes);

}  // namespace emulator

template <class Element>
inline void mma_sync_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulator::MmaOperand own{d, a, b0, b1};
    emulator::current->meet("mma_sync_m16n8k16", own, emulator::mma_m16n8k16<Element>);
}
