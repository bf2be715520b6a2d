// Asynchronous copies from global to shared memory. By the launch's choice they take place as early as may be, when they are issued, or as
// late, when they are waited for. Until then nobody may touch their destination.

namespace emulator {

inline void carry_out(const Copy& copy) {
    unsigned char* to = &current->shared.bytes[copy.destination];
    copy.source ? std::memcpy(to, copy.source, 16) : std::memset(to, 0, 16);
}
inline void issue(SharedAddress destination, const void* source) {
    require(current->shared.may_write(destination, 16, now(), true), destination, 16);
    const u64 from = bits_as<std::uintptr_t>(source);
    if (from % 16) current->fail("global memory", "copies 16 bytes from a misaligned address");
    if (source) current->require_global(from, 16, false, "copies");
    current->thread().open.push_back({destination, source});
    tell("cp_async", source, destination, 16);
    if (!current->options.late_copies) carry_out(current->thread().open.back());
}

}  // namespace emulator

inline void cp_async_16(SharedAddress destination, const void* source, bool valid) {
    emulator::issue(destination, valid ? source : nullptr);
}

inline void cp_async_16(SharedAddress destination, const void* source) { emulator::issue(destination, source); }

inline void cp_async_commit_group() {
    emulator::Thread& thread = emulator::current->thread();
    emulator::tell("cp_async_commit_group");
    thread.groups.push_back(std::move(thread.open));
    thread.open.clear();
}

template <int kPending>
inline void cp_async_wait_group() {
    emulator::Block& block = *emulator::current;
    emulator::Thread& thread = block.thread();
    emulator::tell("cp_async_wait_group", nullptr, kPending);
    while (static_cast<int>(thread.groups.size()) > kPending) {
        for (const emulator::Copy& copy : thread.groups.front()) {
            if (block.options.late_copies) emulator::carry_out(copy);
            block.shared.landed(copy.destination, 16, emulator::now());
        }
        thread.groups.erase(thread.groups.begin());
    }
}
