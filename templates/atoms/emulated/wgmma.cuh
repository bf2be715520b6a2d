// Asynchronous matrix products of a warpgroup: descriptors and fragment maps are those of atoms/ptx/wgmma.cuh, and emulator/wgmma.cuh is
// what stands behind them. Products take place, by the launch's choice, when their group is committed or when it is waited for.
//
// All threads of the warpgroup meet at each of these atoms: on a GPU a product begins once all four warps have issued it. It is one
// operation of the warpgroup, and a wait of one warp is for the whole of it: pipelines in which one thread of a warpgroup gives back the
// stage that all four warps have read, as CUTLASS's do, rely on that.

inline u64 matrix_descriptor(SharedAddress address, u32 offset, u32 panel_bytes = 16) {
    return u64{0x40000040u} << 32 | ((panel_bytes >> 4 << 16 | address >> 4) + (offset >> 4));
}

template <class Element, int kN>
inline void wgmma_ss(float (&d)[kN / 8][4], u64 a, u64 b, int accumulate) {
    emulator::WgmmaOperand own{&d[0][0], nullptr, a, b, accumulate, false, false};
    emulator::issue<Element, kN>("wgmma_ss", own);
}

template <class Element, int kN>
inline void wgmma_rs(float (&d)[kN / 8][4], const u32 (&a)[4], u64 b, int accumulate) {
    emulator::WgmmaOperand own{&d[0][0], a, 0, b, accumulate, false, true};
    emulator::issue<Element, kN>("wgmma_rs", own);
}

inline void wgmma_fence() {
    emulator::meet_at("wgmma_fence", [](emulator::Warpgroup& own) { own.fenced = true; });
}

inline void wgmma_commit_group() {
    emulator::meet_at("wgmma_commit_group", [](emulator::Warpgroup& own) {
        own.groups.push_back(std::move(own.open));
        own.open.clear();
        ++own.committed;
        if (!emulator::current->options.late_copies) emulator::carry_out(own, own.groups.back());
    });
}

template <int kPending>
inline void wgmma_wait_group() {
    emulator::meet_at("wgmma_wait_group", [](emulator::Warpgroup& own) {
        for (; own.groups.size() > kPending; own.groups.pop_front()) emulator::carry_out(own, own.groups.front());
        const int first = emulator::current->running / emulator::kWarpgroup * 4, unit = emulator::kMatrixUnits + first / 4;
        const emulator::Clock complete = own.committed - static_cast<emulator::Clock>(own.groups.size());
        for (int warp = first; warp < first + 4; ++warp) emulator::current->clock(warp)[unit] = complete;
        own.fenced = false;
        emulator::tell("wgmma_complete", nullptr, complete);  // groups so far
    });
}
