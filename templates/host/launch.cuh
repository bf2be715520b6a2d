// How the program that renders this file runs its kernel: blocks spread over threads of the operating system, one entry point.

#include <thread>

namespace host {

// Runs the threads of a block that has begun to their end, or until a check fails.
inline void run_to_the_end(Block& block) {
    for (int thread; !block.fault.found && (thread = block.scheduler.next()) >= 0;) block.resume(thread);
    if (!block.fault.found && !block.done())
        block.fault.report("deadlock", "block " + std::to_string(block.index) + ": no thread can go on: " + block.waiting());
}

inline void run_blocks(const Options& options, int threads, int shared_bytes, void (*kernel)(const void*), const void* parameters, Fault& fault) {
    std::atomic<int> next{options.first_block};
    auto work = [&] {
        Scheduler scheduler(static_cast<Schedule>(options.schedule), threads);
        Block block(options, fault, scheduler, threads, shared_bytes);
        for (int index; !fault.found && (index = next++) < options.first_block + options.blocks;) {
            scheduler.begin((options.seed + 1) * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(index) * 0xD1B54A32D192ED03ull);
            block.begin(index, kernel, parameters);
            run_to_the_end(block);
        }
    };
    std::vector<std::thread> workers;
    for (int i = 1; i < options.workers; ++i) workers.emplace_back(work);
    work();
    for (std::thread& worker : workers) worker.join();
}

}  // namespace host

// Runs the kernel. 0 if no check failed, else 1, with the name of the check and its message, each cut to `size` bytes.
extern "C" int flashgen_host_run(const void* parameters, int threads, int shared_bytes, const host::Options* options, char* check,
                                 char* message, int size) {
    host::Fault fault;
    host::run_blocks(
        *options, threads, shared_bytes, [](const void* p) { FLASHGEN_KERNEL(*static_cast<const Parameters*>(p)); }, parameters, fault);
    if (!fault.found) return 0;
    std::snprintf(check, size, "%s", fault.check.c_str());
    std::snprintf(message, size, "%s", fault.message.c_str());
    return 1;
}
