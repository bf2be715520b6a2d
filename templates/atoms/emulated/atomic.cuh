// Words of global memory by which blocks wait for each other. Blocks on other cores may read and write them meanwhile, so they are atomic
// here, too. The shadow of shared memory takes no order from them: threads of one block order that by barriers.

namespace emulator {

inline void require_word(const u32* address) { current->require_global(bits_as<std::uintptr_t>(address), 4, true, "reads or writes"); }

}  // namespace emulator

// A load that gives what this thread has read there last is a spin.
inline u32 ld_acquire_gpu(const u32* address) {
    emulator::require_word(address);
    const u32 value = __atomic_load_n(address, __ATOMIC_ACQUIRE);
    return emulator::current->spins("ld_acquire_gpu", address, value) ? __atomic_load_n(address, __ATOMIC_ACQUIRE) : value;
}

inline void st_release_gpu(u32* address, u32 value) {
    emulator::require_word(address);
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
    emulator::current->scheduler.stir();
}

inline u32 atom_inc_relaxed_gpu(u32* address, u32 last) {
    emulator::require_word(address);
    u32 before = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(address, &before, before >= last ? 0 : before + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    emulator::current->scheduler.stir();
    return before;
}

inline u32 atom_add_acq_rel_gpu(u32* address, u32 value) {
    emulator::require_word(address);
    const u32 before = __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
    emulator::current->scheduler.stir();
    return before;
}
