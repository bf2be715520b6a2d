// Shared memory: an array of the block, each access checked against its shadow.

using SharedAddress = u32;  // byte address in the array

constexpr u32 kRedZone = emulator::kRedZone;  // bytes after each region that nobody may touch: regions stay as aligned as their sizes are

inline SharedAddress shared_memory() { return 0; }

inline void claim_region(SharedAddress address, int bytes) { emulator::current->claim_region(address, bytes); }

namespace emulator {

inline Moment now() { return current->now(); }
// An address as reports say it: of the running thread's block, or of another one of its cluster.
inline std::string named(SharedAddress address, const Block& block) {
    return std::to_string(address) + (&block == current ? "" : " of block " + std::to_string(block.index));
}
inline void require(bool allowed, SharedAddress address, int size, const Block& block = *current) {
    if (allowed) return;
    const Shared& shared = block.shared;
    if (shared.other < 0) current->fail("shared memory", "%s: %d bytes at %s", shared.fault, size, named(address, block).c_str());
    current->fail("shared memory", "%s: %d bytes at %s, thread %d", shared.fault, size, named(address, block).c_str(), shared.other);
}
template <class T>
inline T read_shared(SharedAddress address, bool alone) {
    require(current->shared.may_read(address, sizeof(T), now(), alone), address, sizeof(T));
    tell("load_shared", nullptr, address, sizeof(T));
    T value;
    std::memcpy(&value, &current->shared.bytes[address], sizeof(T));
    return value;
}
template <class T>
inline void write_shared(SharedAddress address, const T& value) {
    require(current->shared.may_write(address, sizeof(T), now(), false), address, sizeof(T));
    tell("store_shared", nullptr, address, sizeof(T));
    std::memcpy(&current->shared.bytes[address], &value, sizeof(T));
}

}  // namespace emulator

inline u32 load_shared(SharedAddress address) { return emulator::read_shared<u32>(address, true); }

inline uint4 load_shared_v4(SharedAddress address) { return emulator::read_shared<uint4>(address, true); }

inline void store_shared(SharedAddress address, u32 value) { emulator::write_shared(address, value); }

inline void store_shared_v4(SharedAddress address, const uint4& value) { emulator::write_shared(address, value); }
