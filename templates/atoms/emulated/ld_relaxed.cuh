// Loads of words that others may write meanwhile: see atoms/ptx/ld_relaxed.cuh.

inline int ld_relaxed_gpu(const int* address) {
    emulator::current->require_global(bits_as<std::uintptr_t>(address), 4, false, "reads");
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}
