// How the program that renders this file runs its kernel: groups of blocks spread over threads of the operating system, one entry point.

#include <memory>
#include <thread>

namespace emulator {

// Blocks that are resident together, on one thread of the operating system. All of them end before others take their places.
class Residents {
  public:
    Residents(const Options& options, Fault& fault, int threads, int shared_bytes)
        : options(options), fault(fault), threads(threads), scheduler(static_cast<Schedule>(options.schedule), options.resident * threads) {
        for (int place = 0; place < options.resident; ++place) {
            if (place % options.cluster == 0) clusters.push_back(std::make_unique<Cluster>(options.cluster, threads));
            blocks.push_back(std::make_unique<Block>(options, fault, scheduler, *clusters.back(), place, threads, shared_bytes));
            clusters.back()->blocks.push_back(blocks.back().get());
        }
    }

    // Runs blocks [first, first + count) to their end, or until a check fails.
    void run(int first, int count, void (*kernel)(const void*), const void* parameters) {
        scheduler.begin((options.seed + 1) * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(first) * 0xD1B54A32D192ED03ull);
        for (const std::unique_ptr<Cluster>& cluster : clusters) cluster->begin();
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
    std::vector<std::unique_ptr<Cluster>> clusters;
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

// A kernel of the text, its launch bounds (threads of a block, and blocks on an SM), and the blocks of a cluster; 0 if nothing is known of
// them.
struct Kernel {
    void (*run)(const void* parameters);
    int threads, blocks_per_sm, cluster;

    int registers() const { return threads ? kRegistersPerSm / (threads * blocks_per_sm) / 8 * 8 : 0; }
};

inline void run_blocks(const Options& options, int threads, int shared_bytes, const Kernel& kernel, const void* parameters, Fault& fault) {
    const int end = options.first_block + options.blocks;
    std::atomic<int> next{options.first_block};
    auto work = [&] {
        prepare_thread();
        registers_at_launch = kernel.registers();
        Residents residents(options, fault, threads, shared_bytes);
        for (int first; !fault.found && (first = next.fetch_add(options.resident)) < end;)
            residents.run(first, std::min(options.resident, end - first), kernel.run, parameters);
    };
    std::vector<std::thread> workers;
    for (int i = 1; i < options.workers; ++i) workers.emplace_back(work);
    work();
    for (std::thread& worker : workers) worker.join();
}

}  // namespace emulator

#define FLASHGEN_KERNEL(name, Parameters, ...) {[](const void* p) { name(*static_cast<const Parameters*>(p)); }, __VA_ARGS__},

// Runs a kernel, by its number in the text. 0 if no check failed, else 1, with the name of the check and its message, each cut to `size` bytes.
extern "C" int flashgen_emulator_run(int number, const void* parameters, int threads, int shared_bytes, const emulator::Options* options,
                                 char* check, char* message, int size) {
    static constexpr emulator::Kernel kKernels[] = {FLASHGEN_KERNELS(FLASHGEN_KERNEL)};
    const emulator::Kernel& kernel = kKernels[number];
    emulator::Fault fault;
    if (kernel.threads && threads != kernel.threads)
        fault.report("launch", "the block has " + std::to_string(threads) + " threads, the kernel's launch bounds say " + std::to_string(kernel.threads));
    if (kernel.cluster && options->cluster != kernel.cluster)
        fault.report("launch", "the launch's clusters have " + std::to_string(options->cluster) + " blocks, the kernel's text says " +
                                   std::to_string(kernel.cluster));
    if (options->first_block % options->cluster || options->blocks % options->cluster || options->resident % options->cluster)
        fault.report("launch", "clusters run whole: blocks must be multiples of " + std::to_string(options->cluster));
    auto run = [&] { emulator::run_blocks(*options, threads, shared_bytes, kernel, parameters, fault); };
    if (!fault.found && !options->isolated) run();
    if (!fault.found && options->isolated && !emulator::isolated(*options, fault, run)) fault.report("launch", "no process can be had to run it in");
    if (!fault.found) return 0;
    std::snprintf(check, size, "%s", fault.check.c_str());
    std::snprintf(message, size, "%s", fault.message.c_str());
    return 1;
}
