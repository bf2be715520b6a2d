// Warp-wide transposed stores of four 8x8 matrices of 16-bit elements: the lane-to-element map is that of atoms/ptx/stmatrix_trans.cuh.

namespace emulator {

struct StmatrixTransOperand {
    u32 fragment[4];
    u16 row[8];  // what belongs where the lane's address points
};

}  // namespace emulator

inline void stmatrix_x4_trans(SharedAddress row, u32 r0, u32 r1, u32 r2, u32 r3) {
    emulator::StmatrixTransOperand own{{r0, r1, r2, r3}, {}};
    emulator::current->meet("stmatrix_x4_trans", own, [](emulator::StmatrixTransOperand** lanes) {
        for (int lane = 0; lane < emulator::kLanes; ++lane)
            for (int column = 0; column < 8; ++column) {
                const u32 pair = lanes[column * 4 + lane % 8 / 2]->fragment[lane / 8];
                lanes[lane]->row[column] = static_cast<u16>(pair >> lane % 2 * 16);
            }
    });
    uint4 words;
    std::memcpy(&words, own.row, sizeof words);
    emulator::write_shared(row, words);  // each lane its own, so that a fault names it
}
