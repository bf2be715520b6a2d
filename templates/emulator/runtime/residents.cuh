// What runs the kernels: groups of blocks spread over threads of the operating system, launches that overlap, and `run`, which does all of
// it for an entry.

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace emulator {

// Blocks of a launch that are resident together, on one thread of the operating system. All of them end before others take their places.
class Residents {
  public:
    Residents(const Options& options, Progress& progress, Fault& fault, const Kernel& kernel)
        : options(options), progress(progress), launch(progress.launch), fault(fault), kernel(kernel),
          scheduler(static_cast<Schedule>(options.schedule), launch.resident * launch.threads) {
        for (int slot = 0; slot < launch.resident; ++slot) {
            if (slot % launch.cluster == 0) clusters.push_back(std::make_unique<Cluster>(launch.cluster, launch.threads));
            blocks.push_back(std::make_unique<Block>(options, progress, fault, scheduler, *clusters.back(), slot));
            clusters.back()->blocks.push_back(blocks.back().get());
        }
    }

    // The launch's next blocks are at the kernel's begin; false if there are none.
    bool begin() {
        const int first = progress.begun.fetch_add(launch.resident);
        count = std::min(launch.resident, launch.end_block() - first);
        if (count <= 0) return false;
        scheduler.begin((options.seed + 1) * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(first) * 0xD1B54A32D192ED03ull);
        for (const std::unique_ptr<Cluster>& cluster : clusters) cluster->begin();
        for (int slot = 0; slot < count; ++slot) blocks[slot]->begin(first + slot, kernel.run);
        return true;
    }
    // Goes on with the blocks, until all have ended or a check fails: true. False where no thread can go on before the launch that this one
    // overlaps has ended, or before other blocks that have begun change memory.
    bool run() {
        registers_at_launch = kernel.registers();
        scheduler.try_again();
        for (;;) {
            for (int thread; !fault.found && (thread = scheduler.next()) >= 0;) {
                blocks[thread / launch.threads]->resume(thread % launch.threads);
                count_progress();
            }
            if (fault.found) return true;
            if (!wait_for_launch()) break;
            if (!progress.alone()) return false;
            for (int slot = 0; slot < count; ++slot) blocks[slot]->launch_has_ended();
            scheduler.stir();
        }
        if (launch.waits_for_begun && scheduler.spins() && progress.under_way() > count) return false;
        report_waiting();
        progress.ended += count;
        return true;
    }
    const Progress& of() const { return progress; }
    std::uint64_t count_changes() const { return scheduler.count_changes(); }

    bool spins() const { return scheduler.spins(); }

    // No thread can go on: that is well if all have ended.
    void report_waiting() {
        std::string text;
        for (int slot = 0; slot < count; ++slot)
            if (!blocks[slot]->done()) text += (text.empty() ? "" : "; ") + blocks[slot]->waiting();
        if (text.empty()) return;
        const bool spin = scheduler.spins();
        if (spin && launch.blocks > launch.resident)
            text += "; blocks that wait for each other must be resident together: " + std::to_string(launch.resident) + " at a time are";
        fault.report(spin ? "spin that never ends" : "deadlock", "no thread can go on: " + text);
    }

  private:
    const Options& options;
    Progress& progress;
    const Launch& launch;
    Fault& fault;
    const Kernel& kernel;
    int count = 0;  // of blocks that run
    Scheduler scheduler;
    std::vector<std::unique_ptr<Cluster>> clusters;
    std::vector<std::unique_ptr<Block>> blocks;

    bool wait_for_launch() const {
        return std::any_of(blocks.begin(), blocks.begin() + count, [](const auto& block) { return block->waits_for_launch(); });
    }
};

constexpr int kEarly = 4;  // groups of a launch that may wait for the end of the one before, on a thread of the operating system

// What a thread of the operating system does for launches, each of which overlaps the one before: it begins groups of their blocks in an
// order that the schedule says, and goes on with those that have had to wait.
class Worker {
  public:
    Worker(const Options& options, std::deque<Progress>& launches, Fault& fault, const Kernel* kernels)
        : options(options), launches(launches), fault(fault), kernels(kernels), idle(launches.size()),
          random((options.seed + 1) * 0x9E3779B97F4A7C15ull) {}

    void run() {
        while (!fault.found) {
            if (go_on() || begin_next()) continue;  // in this order: of an ordered launch, blocks wait for those that have begun before
            if (waiting.empty()) return;
            if (stuck()) return;
            usleep(100);  // others have blocks of the launch before
        }
    }

  private:
    using Group = std::unique_ptr<Residents>;
    const Options& options;
    std::deque<Progress>& launches;
    Fault& fault;
    const Kernel* const kernels;
    std::vector<std::vector<Group>> idle;  // of each launch
    std::vector<Group> waiting;            // for the launch before or for one another, in the order in which they have begun
    int last = 0;                          // the launch of which blocks have begun last
    std::uint64_t random;

    int number(const Progress& launch) const {
        int i = 0;
        while (&launches[i] != &launch) ++i;
        return i;
    }
    int waiting_of(const Progress& launch) const {
        return static_cast<int>(std::count_if(waiting.begin(), waiting.end(), [&](const Group& group) { return &group->of() == &launch; }));
    }
    // Whether one of those that wait has gone on to its end, or has changed memory for which others may wait.
    bool go_on() {
        const std::uint64_t before = count_changes();
        for (std::size_t i = 0; i < waiting.size(); ++i) {
            if (!waiting[i]->of().alone() || !waiting[i]->run()) continue;
            idle[number(waiting[i]->of())].push_back(std::move(waiting[i]));
            waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
            return true;
        }
        return count_changes() != before;
    }
    // Whether groups wait for each other, and for nothing else. That is reported. Their launch has one core, so nobody else goes on.
    bool stuck() {
        auto waits_for_begun = [](const Group& group) {
            return group->of().launch.waits_for_begun && group->of().alone() && group->spins();
        };
        const auto found = std::find_if(waiting.begin(), waiting.end(), waits_for_begun);
        if (found == waiting.end()) return false;
        (*found)->report_waiting();
        return true;
    }
    std::uint64_t count_changes() const {
        std::uint64_t changes = 0;
        for (const Group& group : waiting) changes += group->count_changes();
        return changes;
    }
    bool begin_next() {
        const int next = choose();
        if (next < 0) return false;
        last = next;
        Progress& launch = launches[next];
        if (idle[next].empty()) idle[next].push_back(std::make_unique<Residents>(options, launch, fault, kernels[launch.launch.kernel]));
        Group group = std::move(idle[next].back());
        idle[next].pop_back();
        const bool has_ended = !group->begin() || group->run();
        (has_ended ? idle[next] : waiting).push_back(std::move(group));
        return true;
    }
    // The launch whose blocks begin next; -1 if none can. Ahead: the first one that has some left; reversed: the last one; in turn, each
    // before the one that it overlaps; or any.
    int choose() {
        std::vector<int> able;
        for (int i = 0; i < static_cast<int>(launches.size()); ++i)
            if (!launches[i].all_begun() && (launches[i].alone() || waiting_of(launches[i]) < kEarly)) able.push_back(i);
        if (able.empty()) return -1;
        switch (static_cast<Schedule>(options.schedule)) {
            case Schedule::kAhead:
                return able.front();
            case Schedule::kReversed:
                return able.back();
            case Schedule::kRandom:
                return able[draw(random) % able.size()];
            case Schedule::kRoundRobin:
                break;
        }
        const auto next = std::find_if(able.rbegin(), able.rend(), [this](int i) { return i < last; });
        return next == able.rend() ? able.back() : *next;
    }
};

inline void run_launches(const Options& options, const Launch* launches, int count, const Kernel* kernels, Fault& fault) {
    std::deque<Progress> chain;
    for (int i = 0; i < count; ++i) chain.emplace_back(launches[i], i ? &chain.back() : nullptr);
    auto work = [&] {
        prepare_thread();
        Worker(options, chain, fault, kernels).run();
    };
    std::vector<std::thread> workers;
    for (int i = 1; i < options.workers; ++i) workers.emplace_back(work);
    work();
    for (std::thread& worker : workers) worker.join();
}

inline void require_launch(const Launch& launch, const Kernel& kernel, Fault& fault) {
    if (kernel.threads && launch.threads != kernel.threads)
        fault.report("launch", "the block has " + std::to_string(launch.threads) + " threads, the kernel's launch bounds say " +
                                   std::to_string(kernel.threads));
    if (kernel.cluster && launch.cluster != kernel.cluster)
        fault.report("launch", "the launch's clusters have " + std::to_string(launch.cluster) + " blocks, the kernel's text says " +
                                   std::to_string(kernel.cluster));
    if (launch.first_block % launch.cluster || launch.blocks % launch.cluster || launch.resident % launch.cluster)
        fault.report("launch", "clusters run whole: blocks must be multiples of " + std::to_string(launch.cluster));
}

void run(const Options& options, const Launch* launches, int count, const Kernel* kernels, Fault& fault) {
    for (int i = 0; i < count; ++i) require_launch(launches[i], kernels[launches[i].kernel], fault);
    if (fault.found) return;
    auto all = [&] { run_launches(options, launches, count, kernels, fault); };
    if (!options.isolated)
        all();
    else if (!isolated(options, fault, all) && !fault.found)
        fault.report("launch", "no process can be had to run it in");
}

}  // namespace emulator
