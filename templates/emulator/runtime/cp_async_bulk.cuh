// What stands behind bulk copies (atoms/emulated/cp_async_bulk.cuh).

namespace emulator {

struct BulkCopy {
    SharedAddress destination;
    const void* source;
    u32 bytes;
};

// A copy has landed. Nobody may be running: it reports, and does not fail.
void land(Block& block, const BulkCopy& copy, Mbarrier& barrier) {
    current = &block;
    std::memcpy(&block.shared.bytes[copy.destination], copy.source, copy.bytes);
    block.shared.landed(copy.destination, static_cast<int>(copy.bytes), barrier.party, barrier.phase + 1);
    barrier.bring(copy.bytes, true);
}

}  // namespace emulator

void cp_async_bulk_load(SharedAddress destination, const void* source, u32 bytes, SharedAddress barrier) {
    emulator::Block& block = *emulator::current;
    const std::uintptr_t address = bits_as<std::uintptr_t>(source);
    if (destination % 16 || address % 16 || bytes % 16)
        block.fail("bulk copy", "copies %u bytes from %llx to %u; all three must be multiples of 16", bytes,
                   static_cast<unsigned long long>(address), destination);
    emulator::Mbarrier& announced = emulator::mbarrier_at(barrier, true);
    for (u32 chunk = 0; chunk < bytes; chunk += 16)
        emulator::require(block.shared.may_write(destination + chunk, 16, emulator::now(), true), destination + chunk, 16);
    block.require_global(address, bytes, false, "copies");
    emulator::tell("cp_async_bulk_load", source, destination, static_cast<int>(bytes), barrier);
    const emulator::BulkCopy copy{destination, source, bytes};
    if (!block.options.late_copies) return emulator::land(block, copy, announced);
    block.scheduler.postpone([&block, copy, &announced] { emulator::land(block, copy, announced); });
}
