// Warp-wide stores of four 8x8 matrices of 16-bit elements: the lane-to-element map is that of atoms/ptx/stmatrix.cuh.

namespace emulator {

struct StmatrixOperand {
    u32 fragment[4];
    uint4 row;  // what belongs where the lane's address points
};

}  // namespace emulator

inline void stmatrix_x4(SharedAddress row, u32 r0, u32 r1, u32 r2, u32 r3) {
    emulator::StmatrixOperand own{{r0, r1, r2, r3}, {}};
    emulator::current->meet("stmatrix_x4", own, [](emulator::StmatrixOperand** lanes) {
        for (int lane = 0; lane < emulator::kLanes; ++lane) {
            const int matrix = lane / 8, first = lane % 8 * 4;
            lanes[lane]->row = {lanes[first]->fragment[matrix], lanes[first + 1]->fragment[matrix], lanes[first + 2]->fragment[matrix],
                                lanes[first + 3]->fragment[matrix]};
        }
    });
    emulator::write_shared(row, own.row);  // each lane its own, so that a fault names it
}
