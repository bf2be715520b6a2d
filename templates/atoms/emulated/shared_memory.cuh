// Shared memory: an array of the block, each access checked against its shadow.

using SharedAddress = u32;  // byte address in the array

constexpr u32 kRedZone = emulator::kRedZone;  // bytes after each region that nobody may touch: regions stay as aligned as their sizes are

inline SharedAddress shared_memory() { return 0; }

inline void claim_region(SharedAddress address, int bytes) { emulator::current->claim_region(address, bytes); }

namespace emulator {

inline Moment now() { return current->now(); }
// An address as reports say it: of the running thread's block, or of another one of its cluster.
std::string named(SharedAddress address, const Block& block);
// Stops the launch if a check of that block's memory has not allowed an access.
void require(bool allowed, SharedAddress address, int size, const Block& block = *current);
void read_shared(void* value, SharedAddress address, int size, bool alone);
void write_shared(const void* value, SharedAddress address, int size);

template <class T>
inline T read_shared(SharedAddress address, bool alone) {
    T value;
    read_shared(&value, address, sizeof(T), alone);
    return value;
}
template <class T>
inline void write_shared(SharedAddress address, const T& value) { write_shared(&value, address, sizeof(T)); }

}  // namespace emulator

inline u32 load_shared(SharedAddress address) { return emulator::read_shared<u32>(address, true); }

inline uint4 load_shared_v4(SharedAddress address) { return emulator::read_shared<uint4>(address, true); }

inline void store_shared(SharedAddress address, u32 value) { emulator::write_shared(address, value); }

inline void store_shared_v4(SharedAddress address, const uint4& value) { emulator::write_shared(address, value); }
