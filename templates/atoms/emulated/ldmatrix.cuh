// Warp-wide loads of four 8x8 matrices of 16-bit elements: the lane-to-element map is that of atoms/ptx/ldmatrix.cuh.

namespace emulator {

struct LdmatrixOperand {
    SharedAddress row;
    u32* fragment;
};

template <bool kTransposed>
inline void ldmatrix_x4(const char* name, u32 (&fragment)[4], SharedAddress row) {
    LdmatrixOperand own{row, fragment};
    // Each lane reads the row whose address it gives, so that a fault names it.
    struct Row { u16 element[8]; };
    struct Given { LdmatrixOperand operand; Row row; } given{own, {}};
    const uint4 value = read_shared<uint4>(row, false);
    std::memcpy(&given.row, &value, 16);
    current->meet(name, given, [](Given** lanes) {
        for (int lane = 0; lane < kLanes; ++lane)
            for (int i = 0; i < 4; ++i) {
                u32 pair = 0;
                for (int half = 0; half < 2; ++half) {
                    const int r = kTransposed ? lane % 4 * 2 + half : lane / 4, c = kTransposed ? lane / 4 : lane % 4 * 2 + half;
                    pair |= static_cast<u32>(lanes[i * 8 + r]->row.element[c]) << half * 16;
                }
                lanes[lane]->operand.fragment[i] = pair;
            }
    });
}

}  // namespace emulator

inline void ldmatrix_x4(u32 (&fragment)[4], SharedAddress row) { emulator::ldmatrix_x4<false>("ldmatrix_x4", fragment, row); }

inline void ldmatrix_x4_trans(u32 (&fragment)[4], SharedAddress row) { emulator::ldmatrix_x4<true>("ldmatrix_x4_trans", fragment, row); }
