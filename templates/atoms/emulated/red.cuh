// Additions of fp32 numbers to global memory. Blocks on other cores may add to the same words meanwhile, so they are atomic here, too.

namespace emulator {

inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

inline void add_f32(float* address, float value) {
    u32* word = reinterpret_cast<u32*>(address);
    u32 before = __atomic_load_n(word, __ATOMIC_RELAXED), after;
    do after = bits_as<u32>(flushed(flushed(bits_as<float>(before)) + flushed(value)));
    while (!__atomic_compare_exchange_n(word, &before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

}  // namespace emulator

inline void red_add_f32(float* address, float value) {
    emulator::current->require_global(bits_as<std::uintptr_t>(address), 4, true, "adds");
    emulator::tell("red_add", address, 0, 4);
    emulator::add_f32(address, value);
}

inline void red_add_f32_v4(float* address, const float (&value)[4]) {
    if (bits_as<std::uintptr_t>(address) % 16) emulator::current->fail("global memory", "adds 16 bytes to a misaligned address");
    emulator::current->require_global(bits_as<std::uintptr_t>(address), 16, true, "adds");
    emulator::tell("red_add", address, 0, 16);
    for (int i = 0; i < 4; ++i) emulator::add_f32(address + i, value[i]);
}
