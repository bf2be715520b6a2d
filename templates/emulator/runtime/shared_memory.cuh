// Accesses to shared memory: see atoms/emulated/shared_memory.cuh.

namespace emulator {

std::string named(SharedAddress address, const Block& block) {
    return std::to_string(address) + (&block == current ? "" : " of block " + std::to_string(block.index));
}

void require(bool allowed, SharedAddress address, int size, const Block& block) {
    if (allowed) return;
    const Shared& shared = block.shared;
    if (shared.other < 0) current->fail("shared memory", "%s: %d bytes at %s", shared.fault, size, named(address, block).c_str());
    current->fail("shared memory", "%s: %d bytes at %s, thread %d", shared.fault, size, named(address, block).c_str(), shared.other);
}

void read_shared(void* value, SharedAddress address, int size, bool alone) {
    require(current->shared.may_read(address, size, now(), alone), address, size);
    tell("load_shared", nullptr, address, size);
    std::memcpy(value, &current->shared.bytes[address], size);
}

void write_shared(const void* value, SharedAddress address, int size) {
    require(current->shared.may_write(address, size, now(), false), address, size);
    tell("store_shared", nullptr, address, size);
    std::memcpy(&current->shared.bytes[address], value, size);
}

}  // namespace emulator
