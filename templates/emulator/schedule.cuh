// Which thread goes on next: the schedules, so that a race that one order hides, another shows; threads that spin on memory, which step
// aside for those that can do something; and what happens late, when all threads wait for it.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace emulator {

constexpr int kLanes = 32;
constexpr int kSpinTries = 100;

enum class Schedule : int { kRoundRobin, kAhead, kReversed, kRandom };  // kAhead: the first warp runs as far as it may, then the next

// Steele, Lea and Flood 2014: SplitMix64.
inline std::uint64_t draw(std::uint64_t& state) {
    std::uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

// Knows which threads can go on, and chooses among them. Threads are numbered through all blocks that are resident together.
class Scheduler {
  public:
    Scheduler(Schedule schedule, int threads) : schedule(schedule), able(threads / kLanes) {}

    // Nobody can go on yet.
    void begin(std::uint64_t seed) {
        random = seed;
        last_warp = 0;
        std::fill(able.begin(), able.end(), 0u);
        spinning.clear(), later.clear(), tries = 0;
    }
    void wake(int thread) { able[thread / kLanes] |= 1u << thread % kLanes; }
    void halt(int thread) {
        able[thread / kLanes] &= ~(1u << thread % kLanes);
        tries = 0;
    }
    // What the thread waits for in memory has not changed: it tries again once something has.
    void set_aside(int thread) {
        able[thread / kLanes] &= ~(1u << thread % kLanes);
        spinning.push_back(thread);
    }
    // Memory that others may wait for has changed.
    void stir() {
        ++changes;
        try_again();
    }
    // Threads that spin do so once more: blocks of other groups may have changed memory.
    void try_again() {
        tries = 0;
        wake_spinning();
    }
    std::uint64_t count_changes() const { return changes; }
    // `deed` happens once no thread can do anything but wait.
    void postpone(std::function<void()> deed) { later.push_back(std::move(deed)); }
    bool spins() const { return !spinning.empty(); }

    // The thread that goes on; -1 if none can. Where only threads that spin are left, what was postponed happens, one deed at a time. Then
    // they try again, but not for ever: plain stores, and blocks on other cores, change memory too, and stir nobody.
    int next() {
        int warp;
        while ((warp = next_warp()) < 0) {
            if (!later.empty()) {
                do_postponed();
            } else if (spins() && tries++ < kSpinTries) {
                wake_spinning();
            } else {
                return -1;
            }
        }
        last_warp = warp;
        return warp * kLanes + next_lane(able[warp]);
    }

  private:
    Schedule schedule;
    std::vector<std::uint32_t> able;  // lanes of each warp that can go on
    std::uint64_t random = 0;
    int last_warp = 0;
    std::vector<int> spinning;  // threads that are set aside
    std::uint64_t changes = 0;  // of memory that others may wait for, by these threads
    int tries = 0;              // how often all of them have tried again, and nothing else has happened
    std::vector<std::function<void()>> later;

    void wake_spinning() {
        for (const int thread : spinning) wake(thread);
        spinning.clear();
    }
    // The oldest deed, or any.
    void do_postponed() {
        const auto chosen = later.begin() + (schedule == Schedule::kRandom ? static_cast<std::ptrdiff_t>(draw(random) % later.size()) : 0);
        const std::function<void()> deed = std::move(*chosen);
        later.erase(chosen);
        deed();
    }
    int next_warp() {
        const int warps = static_cast<int>(able.size());
        switch (schedule) {
            case Schedule::kRoundRobin:
                for (int i = 1; i <= warps; ++i)
                    if (able[(last_warp + i) % warps]) return (last_warp + i) % warps;
                return -1;
            case Schedule::kAhead:
                for (int i = 0; i < warps; ++i)
                    if (able[i]) return i;
                return -1;
            case Schedule::kReversed:
                for (int i = warps - 1; i >= 0; --i)
                    if (able[i]) return i;
                return -1;
            case Schedule::kRandom:
                return drawn_warp();
        }
        return -1;
    }
    int drawn_warp() {
        int count = 0;
        for (const std::uint32_t lanes : able) count += lanes != 0;
        if (!count) return -1;
        int skip = static_cast<int>(draw(random) % count);
        for (int i = 0;; ++i)
            if (able[i] && skip-- == 0) return i;
    }
    int next_lane(std::uint32_t lanes) {
        if (schedule == Schedule::kReversed) return 31 - __builtin_clz(lanes);
        if (schedule != Schedule::kRandom) return __builtin_ctz(lanes);
        for (int skip = static_cast<int>(draw(random) % __builtin_popcount(lanes)); skip > 0; --skip) lanes &= lanes - 1;
        return __builtin_ctz(lanes);
    }
};

}  // namespace emulator
