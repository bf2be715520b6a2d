// A launch in a child process: whatever the kernel does, it becomes a report. A crash says where, and a kernel that goes on for ever is
// stopped.

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <string>
#include <vector>

namespace emulator {

// What both processes see. `progress` counts how often a thread of the kernel has gone on.
struct Outcome {
    std::atomic<std::uint64_t> progress;
    std::atomic<bool> begun;  // somebody writes the report
    bool found;
    char check[100], message[4000];

    void report(const std::string& failed, const std::string& text) {
        if (begun.exchange(true)) return;
        std::snprintf(check, sizeof check, "%s", failed.c_str());
        std::snprintf(message, sizeof message, "%s", text.c_str());
        found = true;
    }
};

inline Outcome* outcome = nullptr;  // of the launch that has this process for itself, if one has
inline const Options* launched = nullptr;
constexpr int kFatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr std::size_t kHandlerBytes = 64 * 1024;

inline std::string running_thread() {
    if (!current) return "";
    return "block " + std::to_string(current->index) + ": thread " + std::to_string(current->running) + " (warp " +
           std::to_string(current->running / kLanes) + ", lane " + std::to_string(current->running % kLanes) + ") ";
}

// The process ends here: nothing that this may leave behind matters to it.
inline void on_fatal(int signal, siginfo_t* info, void*) {
    const std::string thread = running_thread(), ends = thread + "ends by a signal: " + strsignal(signal);
    const auto at = bits_as<std::uintptr_t>(info->si_addr);
    const std::string where = place_among(launched->extents, launched->extent_count, at);
    if (signal != SIGSEGV && signal != SIGBUS)
        outcome->report("crash", ends);
    else if (lies_by_one(launched->extents, launched->extent_count, at))
        outcome->report("global memory", thread + "reads or writes what it may not: " + where);
    else
        outcome->report("crash", ends + ", at an address " + where);
    _exit(1);
}

// Each thread of the operating system needs a stack for handlers: that of a fiber may be what is wrong.
inline void prepare_thread() {
    if (!outcome) return;
    stack_t stack{};
    stack.ss_sp = std::malloc(kHandlerBytes), stack.ss_size = kHandlerBytes;
    sigaltstack(&stack, nullptr);
}
inline void count_progress() {
    if (outcome) outcome->progress.fetch_add(1, std::memory_order_relaxed);
}

// Waits for the child to end, with `status`. Why it had to be stopped: empty if it ended itself.
inline std::string watch(pid_t child, const Outcome& outcome, const Options& options, int& status) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    auto last = begin;
    std::uint64_t seen = 0;
    for (int pause = 50;; pause = std::min(pause + pause / 4, 5000)) {
        if (const pid_t ended = waitpid(child, &status, WNOHANG); ended == child || (ended < 0 && errno != EINTR)) return "";
        usleep(pause);
        const auto now = Clock::now();
        if (const std::uint64_t progress = outcome.progress; progress != seen) seen = progress, last = now;
        const auto passed = [now](Clock::time_point since) { return std::chrono::duration<double>(now - since).count(); };
        char text[200] = "";
        if (options.stall_seconds > 0 && passed(last) > options.stall_seconds)
            std::snprintf(text, sizeof text, "no thread of the kernel has waited or ended for %g s", options.stall_seconds);
        else if (options.limit_seconds > 0 && passed(begin) > options.limit_seconds)
            std::snprintf(text, sizeof text, "the launch did not end in %g s", options.limit_seconds);
        if (!*text) continue;
        kill(child, SIGKILL);
        while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
        return text;
    }
}

// `run` in a child process. What it finds, or how it ends, is in `found`; false if there can be no child.
template <class Run>
inline bool isolated(const Options& options, Fault& fault, const Run& run) {
    void* const memory = mmap(nullptr, sizeof(Outcome), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    Outcome& shared = *new (memory) Outcome{};
    const pid_t parent = getpid(), child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        outcome = &shared, launched = &options;
        struct sigaction action {};
        action.sa_sigaction = on_fatal, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (const int fatal : kFatal) sigaction(fatal, &action, nullptr);
        signal(SIGINT, SIG_DFL);
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, nullptr);
        run();
        if (fault.found) shared.report(fault.check, fault.message);
        std::fflush(stdout);
        _exit(0);
    }
    int status = 0;
    const std::string stopped = child > 0 ? watch(child, shared, options, status) : "";
    if (!stopped.empty())
        fault.report("endless", stopped);
    else if (shared.found)
        fault.report(shared.check, shared.message);
    else if (child > 0 && !(WIFEXITED(status) && WEXITSTATUS(status) == 0)) {
        const std::string signal = "signal " + std::to_string(WTERMSIG(status)), code = "exit code " + std::to_string(WEXITSTATUS(status));
        fault.report("crash", "the launch's process ended by " + (WIFSIGNALED(status) ? signal : code));
    }
    munmap(memory, sizeof(Outcome));
    return child > 0;
}

}  // namespace emulator
