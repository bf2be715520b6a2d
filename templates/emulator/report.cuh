// What a launch that was stopped has to say: why a thread does not run, and the check that failed.

#include <atomic>
#include <mutex>
#include <string>

namespace emulator {

// Why a thread does not run.
struct Wait {
    enum Kind { kNone, kForLanes, kAtBarrier, kOnMemory, kOnPhase, kForLaunch, kEnded } kind = kNone;
    const char* at = nullptr;     // the atom
    std::uint64_t which = 0;      // barrier, or address
    std::uint64_t value = 0;      // that does not change
    std::uint64_t arrivals = 0, bytes = 0;  // that a phase lacks; `value` is its parity

    bool operator==(const Wait& other) const;
    std::string text() const;
};

// Why a launch was stopped: the check that failed, and a message for people.
struct Fault {
    std::atomic<bool> found{false};
    std::mutex mutex;
    std::string check, message;

    // The first one counts.
    void report(const char* failed, const std::string& text);
};

}  // namespace emulator
