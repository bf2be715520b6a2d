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

    bool operator==(const Wait& other) const {
        return kind == other.kind && at == other.at && which == other.which && value == other.value && arrivals == other.arrivals &&
               bytes == other.bytes;
    }
    std::string text() const {
        char text[200] = "can go on";
        if (kind == kForLanes || kind == kForLaunch) std::snprintf(text, sizeof text, "wait at %s", at);
        if (kind == kAtBarrier) std::snprintf(text, sizeof text, "wait at %s %d", at, static_cast<int>(which));
        if (kind == kOnMemory)
            std::snprintf(text, sizeof text, "spin at %s of 0x%llx, which stays %llu", at, static_cast<unsigned long long>(which),
                          static_cast<unsigned long long>(value));
        if (kind == kOnPhase)
            std::snprintf(text, sizeof text, "spin at %s of %d, phase parity %d: %d arrivals and %d bytes are missing", at,
                          static_cast<int>(which), static_cast<int>(value), static_cast<int>(arrivals), static_cast<int>(bytes));
        if (kind == kEnded) return "have ended";
        return text;
    }
};

// Why a launch was stopped: the check that failed, and a message for people.
struct Fault {
    std::atomic<bool> found{false};
    std::mutex mutex;
    std::string check, message;

    // The first one counts.
    void report(const char* failed, const std::string& text) {
        const std::lock_guard<std::mutex> guard(mutex);
        if (found) return;
        check = failed, message = text;
        found = true;
    }
};

}  // namespace emulator
