// Asynchronous copies: see atoms/emulated/cp_async.cuh.

namespace emulator {

static void carry_out(const Copy& copy) {
    unsigned char* to = &current->shared.bytes[copy.destination];
    copy.source ? std::memcpy(to, copy.source, 16) : std::memset(to, 0, 16);
}

void issue(SharedAddress destination, const void* source) {
    require(current->shared.may_write(destination, 16, now(), true), destination, 16);
    const u64 from = bits_as<std::uintptr_t>(source);
    if (from % 16) current->fail("global memory", "copies 16 bytes from a misaligned address");
    if (source) current->require_global(from, 16, false, "copies");
    current->thread().open.push_back({destination, source});
    tell("cp_async", source, destination, 16);
    if (!current->options.late_copies) carry_out(current->thread().open.back());
}

void wait_groups(int pending) {
    Thread& thread = current->thread();
    tell("cp_async_wait_group", nullptr, pending);
    while (static_cast<int>(thread.groups.size()) > pending) {
        for (const Copy& copy : thread.groups.front()) {
            if (current->options.late_copies) carry_out(copy);
            current->shared.landed(copy.destination, 16, now());
        }
        thread.groups.erase(thread.groups.begin());
    }
}

}  // namespace emulator

void cp_async_commit_group() {
    emulator::Thread& thread = emulator::current->thread();
    emulator::tell("cp_async_commit_group");
    thread.groups.push_back(std::move(thread.open));
    thread.open.clear();
}
