// What stands behind bulk copies to another block (atoms/emulated/cp_async_bulk_send.cuh).

namespace emulator {

struct SentCopy {
    const Block* from;
    SharedAddress source;
    SharedAddress destination;
    u32 bytes;
    Clock phase;  // of the mbarrier when it was issued
};

// A copy has landed. Nobody may be running: it reports, and does not fail.
void land(const SentCopy& copy, Mbarrier& barrier) {
    Block& block = barrier.block;
    if (barrier.phase != copy.phase)
        block.fault.report("mbarrier", "block " + std::to_string(block.index) + ": a phase of the mbarrier at " +
                                           std::to_string(barrier.address) + " is complete without a copy of block " +
                                           std::to_string(copy.from->index) + " that was issued in it");
    std::memcpy(&block.shared.bytes[copy.destination], &copy.from->shared.bytes[copy.source], copy.bytes);
    block.shared.landed(copy.destination, static_cast<int>(copy.bytes), barrier.party, barrier.phase + 1);
    barrier.bring(copy.bytes, false);
}

}  // namespace emulator

void cp_async_bulk_send(ClusterAddress destination, SharedAddress source, u32 bytes, ClusterAddress barrier) {
    emulator::Block& block = *emulator::current;
    const emulator::ClusterPlace to = emulator::place_of(destination), at = emulator::place_of(barrier);
    if (to.address % 16 || source % 16 || bytes % 16)
        block.fail("bulk copy", "copies %u bytes from %u to %s; all three must be multiples of 16", bytes, source,
                   emulator::named(to.address, to.block).c_str());
    if (&to.block != &at.block)
        block.fail("bulk copy", "copies to block %d, and counts at an mbarrier of block %d", to.block.index, at.block.index);
    emulator::Mbarrier& counts = emulator::mbarrier_at(at.address, true, at.block);
    const emulator::Clock landed = counts.phase + 1;
    const int party = (to.block.rank - block.rank) * emulator::kParties + counts.party;
    for (u32 chunk = 0; chunk < bytes; chunk += 16) {
        emulator::require(block.shared.may_send(source + chunk, 16, block.now(), party, landed), source + chunk, 16);
        const bool free = to.block.shared.may_write(to.address + chunk, 16, block.now_in(to.block), true);
        emulator::require(free, to.address + chunk, 16, to.block);
    }
    for (const emulator::Block* used : {&to.block, &block}) block.cluster.use(*used, to.block, counts.party, landed);
    const emulator::SentCopy copy{&block, source, to.address, bytes, counts.phase};
    if (!block.options.late_copies) return emulator::land(copy, counts);
    block.scheduler.postpone([copy, &counts] { emulator::land(copy, counts); });
}
