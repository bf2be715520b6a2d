// How the program that renders this file runs its kernel: blocks spread over threads of the operating system, one entry point.

#include <thread>

namespace host {

inline void run_blocks(const Options& options, int threads, int shared_bytes, void (*kernel)(const void*), const void* parameters, Fault& fault) {
    std::atomic<int> next{options.first_block};
    auto work = [&] {
        Block block(options, &fault, threads, shared_bytes);
        for (int index; !fault.found && (index = next++) < options.first_block + options.blocks;) block.run(index, kernel, parameters);
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
