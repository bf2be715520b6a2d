// How the program that renders this file runs its kernel: groups of blocks spread over threads of the operating system, one entry point.

#include <memory>
#include <thread>

namespace emulator {

// Blocks that are resident together, on one thread of the operating system. All of them end before others take their places.
class Residents {
  public:
    Residents(const Options& options, Fault& fault, int threads, int shared_bytes)
        : options(options), fault(fault), threads(threads), scheduler(static_cast<Schedule>(options.schedule), options.resident * threads) {
        for (int place = 0; place < options.resident; ++place)
            blocks.push_back(std::make_unique<Block>(options, fault, scheduler, place, threads, shared_bytes));
    }

    // Runs blocks [first, first + count) to their end, or until a check fails.
    void run(int first, int count, void (*kernel)(const void*), const void* parameters) {
        scheduler.begin((options.seed + 1) * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(first) * 0xD1B54A32D192ED03ull);
        for (int place = 0; place < count; ++place) blocks[place]->begin(first + place, kernel, parameters);
        for (int thread; !fault.found && (thread = scheduler.next()) >= 0;) {
            blocks[thread / threads]->resume(thread % threads);
            count_progress();
        }
        if (!fault.found) report_waiting(count);
    }

  private:
    const Options& options;
    Fault& fault;
    const int threads;
    Scheduler scheduler;
    std::vector<std::unique_ptr<Block>> blocks;

    // No thread can go on: that is well if all have ended.
    void report_waiting(int count) {
        std::string text;
        for (int place = 0; place < count; ++place)
            if (!blocks[place]->done()) text += (text.empty() ? "" : "; ") + blocks[place]->waiting();
        if (text.empty()) return;
        const bool spin = scheduler.spins();
        if (spin && options.blocks > options.resident)
            text += "; blocks that wait for each other must be resident together: " + std::to_string(options.resident) + " at a time are";
        fault.report(spin ? "spin that never ends" : "deadlock", "no thread can go on: " + text);
    }
};

inline void run_blocks(const Options& options, int threads, int shared_bytes, void (*kernel)(const void*), const void* parameters, Fault& fault) {
    const int end = options.first_block + options.blocks;
    std::atomic<int> next{options.first_block};
    auto work = [&] {
        prepare_thread();
        Residents residents(options, fault, threads, shared_bytes);
        for (int first; !fault.found && (first = next.fetch_add(options.resident)) < end;)
            residents.run(first, std::min(options.resident, end - first), kernel, parameters);
    };
    std::vector<std::thread> workers;
    for (int i = 1; i < options.workers; ++i) workers.emplace_back(work);
    work();
    for (std::thread& worker : workers) worker.join();
}

}  // namespace emulator

// Runs the kernel. 0 if no check failed, else 1, with the name of the check and its message, each cut to `size` bytes.
extern "C" int flashgen_emulator_run(const void* parameters, int threads, int shared_bytes, const emulator::Options* options, char* check,
                                 char* message, int size) {
    emulator::Fault fault;
#ifdef FLASHGEN_LAUNCH_BOUNDS
    constexpr int kBounds[] = {FLASHGEN_LAUNCH_BOUNDS};  // threads of a block, and blocks on an SM
    emulator::registers_at_launch = emulator::kRegistersPerSm / (kBounds[0] * kBounds[1]) / 8 * 8;
    if (threads != kBounds[0])
        fault.report("launch", "the block has " + std::to_string(threads) + " threads, the kernel's launch bounds say " + std::to_string(kBounds[0]));
#endif
    auto run = [&] {
        emulator::run_blocks(
            *options, threads, shared_bytes, [](const void* p) { FLASHGEN_KERNEL(*static_cast<const FLASHGEN_PARAMETERS*>(p)); }, parameters, fault);
    };
    if (!fault.found && !options->isolated) run();
    if (!fault.found && options->isolated && !emulator::isolated(*options, fault, run)) fault.report("launch", "no process can be had to run it in");
    if (!fault.found) return 0;
    std::snprintf(check, size, "%s", fault.check.c_str());
    std::snprintf(message, size, "%s", fault.message.c_str());
    return 1;
}
