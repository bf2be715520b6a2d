// Asynchronous matrix products of a warpgroup: descriptors and fragment maps are those of atoms/ptx/wgmma.cuh, and
// emulator/runtime/wgmma.cuh is what stands behind them. Products take place, by the launch's choice, when their group is committed or when
// it is waited for.
//
// All threads of the warpgroup meet at each of these atoms: on a GPU a product begins once all four warps have issued it. It is one
// operation of the warpgroup, and a wait of one warp is for the whole of it: pipelines in which one thread of a warpgroup gives back the
// stage that all four warps have read, as CUTLASS's do, rely on that.

namespace emulator {

struct WgmmaOperand {
    float* d;
    const u32* a_registers;  // or null
    u64 a, b;
    int accumulate;
    bool a_mn_major, b_mn_major;
    int columns = 0;  // of b and d
    float (*value_of)(u16 bits) = nullptr;
};

void issue(const char* name, WgmmaOperand& operand);
void wait_products(int pending);

template <class Element, int kN>
inline void issue(const char* name, WgmmaOperand operand) {
    static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256, "a multiple of 8 from 8 to 256");
    operand.columns = kN;
    operand.value_of = [](u16 bits) { return value_of(Element{bits}); };
    issue(name, operand);
}

}  // namespace emulator

inline u64 matrix_descriptor(SharedAddress address, u32 offset, u32 panel_bytes = 16) {
    return u64{0x40000040u} << 32 | ((panel_bytes >> 4 << 16 | address >> 4) + (offset >> 4));
}

template <class Element, int kN>
inline void wgmma_ss(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate) {
    emulator::issue<Element, kN>("wgmma_ss", {&d[0][0], nullptr, a, b, accumulate, false, false});
}

template <class Element, int kN>
inline void wgmma_rs(float (&d)[kN / 8][4], const u32 (&a)[4], u64 b, int accumulate) {
    emulator::issue<Element, kN>("wgmma_rs", {&d[0][0], a, 0, b, accumulate, false, true});
}

void wgmma_fence();

void wgmma_commit_group();

template <int kPending>
inline void wgmma_wait_group() { emulator::wait_products(kPending); }
