// The entry of a text with emulated atoms: its kernels, by their numbers, for what runs them.

#define FLASHGEN_KERNEL(name, Parameters, ...) {[](const void* p) { name(*static_cast<const Parameters*>(p)); }, __VA_ARGS__},

// See emulator::run in launch.cuh. The check and its message are each cut to `size` bytes.
extern "C" int flashgen_emulator_run(const emulator::Launch* launches, int count, const emulator::Options* options, char* check,
                                     char* message, int size) {
    static constexpr emulator::Kernel kKernels[] = {FLASHGEN_KERNELS(FLASHGEN_KERNEL)};
    emulator::Fault fault;
    emulator::run(*options, launches, count, kKernels, fault);
    if (!fault.found) return 0;
    std::snprintf(check, size, "%s", fault.check.c_str());
    std::snprintf(message, size, "%s", fault.message.c_str());
    return 1;
}
