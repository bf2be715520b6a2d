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

// Knows which threads can go on, and chooses among them. Threads are numbered through all blocks that are resident together.
class Scheduler {
  public:
    Scheduler(Schedule schedule, int threads);

    // Nobody can go on yet.
    void begin(std::uint64_t seed);
    void wake(int thread);
    void halt(int thread);
    // What the thread waits for in memory has not changed: it tries again once something has.
    void set_aside(int thread);
    // Memory that others may wait for has changed.
    void stir();
    // Threads that spin do so once more: blocks of other groups may have changed memory.
    void try_again();
    std::uint64_t count_changes() const { return changes; }
    // `deed` happens once no thread can do anything but wait.
    void postpone(std::function<void()> deed);
    bool spins() const;

    // The thread that goes on; -1 if none can. Where only threads that spin are left, what was postponed happens, one deed at a time. Then
    // they try again, but not for ever: plain stores, and blocks on other cores, change memory too, and stir nobody.
    int next();

  private:
    Schedule schedule;
    std::vector<std::uint32_t> able;  // lanes of each warp that can go on
    std::uint64_t random = 0;
    int last_warp = 0;
    std::vector<int> spinning;  // threads that are set aside
    std::uint64_t changes = 0;  // of memory that others may wait for, by these threads
    int tries = 0;              // how often all of them have tried again, and nothing else has happened
    std::vector<std::function<void()>> later;

    void wake_spinning();
    // The oldest deed, or any.
    void do_postponed();
    int next_warp();
    int drawn_warp();
    int next_lane(std::uint32_t lanes);
};

}  // namespace emulator
