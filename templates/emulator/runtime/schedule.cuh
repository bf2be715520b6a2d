// The schedules: see emulator/schedule.cuh.

namespace emulator {

// Steele, Lea and Flood 2014: SplitMix64.
static std::uint64_t draw(std::uint64_t& state) {
    std::uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

Scheduler::Scheduler(Schedule schedule, int threads) : schedule(schedule), able(threads / kLanes) {}

void Scheduler::begin(std::uint64_t seed) {
    random = seed;
    last_warp = 0;
    std::fill(able.begin(), able.end(), 0u);
    spinning.clear(), later.clear(), tries = 0;
}

void Scheduler::wake(int thread) { able[thread / kLanes] |= 1u << thread % kLanes; }

void Scheduler::halt(int thread) {
    able[thread / kLanes] &= ~(1u << thread % kLanes);
    tries = 0;
}

void Scheduler::set_aside(int thread) {
    able[thread / kLanes] &= ~(1u << thread % kLanes);
    spinning.push_back(thread);
}

void Scheduler::stir() {
    ++changes;
    try_again();
}

void Scheduler::try_again() {
    tries = 0;
    wake_spinning();
}

void Scheduler::postpone(std::function<void()> deed) { later.push_back(std::move(deed)); }

bool Scheduler::spins() const { return !spinning.empty(); }

int Scheduler::next() {
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

void Scheduler::wake_spinning() {
    for (const int thread : spinning) wake(thread);
    spinning.clear();
}

void Scheduler::do_postponed() {
    const auto chosen = later.begin() + (schedule == Schedule::kRandom ? static_cast<std::ptrdiff_t>(draw(random) % later.size()) : 0);
    const std::function<void()> deed = std::move(*chosen);
    later.erase(chosen);
    deed();
}

int Scheduler::next_warp() {
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

int Scheduler::drawn_warp() {
    int count = 0;
    for (const std::uint32_t lanes : able) count += lanes != 0;
    if (!count) return -1;
    int skip = static_cast<int>(draw(random) % count);
    for (int i = 0;; ++i)
        if (able[i] && skip-- == 0) return i;
}

int Scheduler::next_lane(std::uint32_t lanes) {
    if (schedule == Schedule::kReversed) return 31 - __builtin_clz(lanes);
    if (schedule != Schedule::kRandom) return __builtin_ctz(lanes);
    for (int skip = static_cast<int>(draw(random) % __builtin_popcount(lanes)); skip > 0; --skip) lanes &= lanes - 1;
    return __builtin_ctz(lanes);
}

}  // namespace emulator
