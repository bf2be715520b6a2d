// Reads of two neighbouring fp32 values in shared memory.

inline void load_shared_pair(float& first, float& second, SharedAddress address) {
    const u64 pair = emulator::read_shared<u64>(address, true);
    first = bits_as<float>(static_cast<u32>(pair));
    second = bits_as<float>(static_cast<u32>(pair >> 32));
}
