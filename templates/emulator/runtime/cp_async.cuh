// Asynchronous copies: see atoms/emulated/cp_async.cuh.

namespace emulator {

static void carry_out(const Copy& copy) {
    unsigned char* to = &current->shared.bytes[copy.destination];
    copy.source ? std::memcpy(to, copy.source, copy.bytes) : std::memset(to, 0, copy.bytes);
}

void issue(SharedAddress destination, const void* source, int bytes) {
    require(current->shared.may_write(destination, bytes, now(), true), destination, bytes);
    const u64 from = bits_as<std::uintptr_t>(source);
    if (from % bytes) current->fail("global memory", "copies %d bytes from a misaligned address", bytes);
    if (source) current->require_global(from, bytes, false, "copies");
    current->thread().open.push_back({destination, source, bytes});
    tell("cp_async", source, destination, bytes);
    if (!current->options.late_copies) carry_out(current->thread().open.back());
}

void wait_groups(int pending) {
    Thread& thread = current->thread();
    tell("cp_async_wait_group", nullptr, pending);
    while (static_cast<int>(thread.groups.size()) > pending) {
        for (const Copy& copy : thread.groups.front()) {
            if (current->options.late_copies) carry_out(copy);
            current->shared.landed(copy.destination, copy.bytes, now());
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
