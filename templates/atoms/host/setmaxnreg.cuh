// Registers of a warpgroup: the host has no limit. What remains is that all threads of the warpgroup come, and which numbers there are.

namespace host {

template <int kRegisters>
inline void setmaxnreg(const char* name) {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "a multiple of 8 from 24 to 256");
    int nothing = 0;
    current->meet_warpgroup(name, nothing, [](int**) {});
}

}  // namespace host

template <int kRegisters>
inline void setmaxnreg_dec() { host::setmaxnreg<kRegisters>("setmaxnreg_dec"); }

template <int kRegisters>
inline void setmaxnreg_inc() { host::setmaxnreg<kRegisters>("setmaxnreg_inc"); }
