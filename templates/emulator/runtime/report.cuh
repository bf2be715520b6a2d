// Reports in words: see emulator/report.cuh.

namespace emulator {

bool Wait::operator==(const Wait& other) const {
    return kind == other.kind && at == other.at && which == other.which && value == other.value && arrivals == other.arrivals &&
           bytes == other.bytes;
}

std::string Wait::text() const {
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

void Fault::report(const char* failed, const std::string& text) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (found) return;
    check = failed, message = text;
    found = true;
}

}  // namespace emulator
