// What stands behind bulk stores (atoms/emulated/cp_async_bulk_store.cuh).

void cp_async_bulk_store(void* destination, SharedAddress source, u32 bytes) {
    emulator::Block& block = *emulator::current;
    const std::uintptr_t address = bits_as<std::uintptr_t>(destination);
    if (source % 16 || address % 16 || bytes % 16)
        block.fail("bulk copy", "stores %u bytes from %u to %llx; all three must be multiples of 16", bytes, source,
                   static_cast<unsigned long long>(address));
    block.require_global(address, bytes, true, "stores");
    const emulator::Piece piece{destination, source, bytes};
    piece.visit_stored([&](SharedAddress chunk) {
        emulator::require(block.shared.may_store(chunk, 16, emulator::now()), chunk, 16);
    });
    emulator::tell("cp_async_bulk_store", destination, source, static_cast<int>(bytes));
    if (!block.options.late_copies) piece.store();
    block.kept<emulator::Stores>().own().open.push_back(piece);
}
