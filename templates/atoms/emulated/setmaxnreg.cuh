// Registers of a warpgroup. The emulator has no limit, but counts what warpgroups have: together no more than the launch bounds give a
// block, which a GPU would wait for without end, and no less than it could be.

namespace emulator {

struct Registers : Kept {
    const int warpgroups = current->threads / kWarpgroup;
    std::vector<int> of_warpgroup = std::vector<int>(warpgroups, registers_at_launch);  // of a thread
    int ended = 0, taking = 0;  // threads that have ended; warpgroups that have taken some

    void set(const char* name, int wanted, bool takes) {
        int& own = of_warpgroup[current->running / kWarpgroup];
        if (takes ? wanted < own : wanted > own)
            current->fail("registers", "is at %s to have %d registers a thread, and has %d", name, wanted, own);
        own = wanted, taking += takes;
    }
    void thread_ends(Block& block) override {
        if (++ended < warpgroups * kWarpgroup) return;
        const int there = registers_at_launch * warpgroups;
        int used = 0;
        for (const int own : of_warpgroup) used += own;
        if (used > there || there - used >= 8 * std::max(taking, 1))
            block.fail("registers",
                       "ends the block, whose warpgroups have %d registers together, a thread of each; the launch gives them %d",  //
                       used, there);
    }
};

template <int kRegisters>
inline void setmaxnreg(const char* name, bool takes) {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "a multiple of 8 from 24 to 256");
    struct Nothing {
    } own;
    current->meet_warpgroup(name, own, [name, takes](Nothing**) {
        if (registers_at_launch) current->kept<Registers>().set(name, kRegisters, takes);
    });
}

}  // namespace emulator

template <int kRegisters>
inline void setmaxnreg_dec() { emulator::setmaxnreg<kRegisters>("setmaxnreg_dec", false); }

template <int kRegisters>
inline void setmaxnreg_inc() { emulator::setmaxnreg<kRegisters>("setmaxnreg_inc", true); }
