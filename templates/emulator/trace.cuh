// What a launch does, as a list of records: behind the kernels of a text that is compiled with -fsanitize=thread. The compiler then calls
// a function before each load and store of plain C++, and those functions are here, in place of the sanitizer's runtime. What atoms do
// comes from `told` in block.cuh. Each record has the stack of return addresses, from which a debugger's tables give the lines.

#include <cstdint>
#include <cstring>

namespace emulator {

constexpr int kTraceFrames = 24, kTraceStacks = 1 << 12, kTraceOps = 64, kOpChars = 32;

// `operand`: which of the launch's tensors, -1 for none; `offset`: from its first byte; `shared`: an address in shared memory; `mbarrier`:
// that of one at which a copy counts.
struct TraceRecord {
    std::uint64_t offset;
    std::uint32_t shared, block, stack;
    std::int16_t thread, operand;
    std::uint16_t bytes;
    std::uint8_t op, written;
    std::uint32_t mbarrier;
};

// In memory that the process which asks for the trace sees. `count` goes on past `capacity`, so that what is missing shows.
struct Trace {
    std::uint64_t count, capacity, unused;
    char ops[kTraceOps][kOpChars];
    std::uint64_t stacks[kTraceStacks][kTraceFrames];  // offsets in the library, from inside to outside; a hash table
    TraceRecord records[1];
};

static Trace* trace = nullptr;
static bool tracing = false;  // what the functions below touch themselves is not told

#ifdef __clang__  // whose no_sanitize leaves atomics as calls
#define FLASHGEN_UNTRACED __attribute__((disable_sanitizer_instrumentation, noinline))
#else
#define FLASHGEN_UNTRACED __attribute__((no_sanitize("thread"), noinline))
#endif
extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));  // where the library was loaded

// The number of the stack that ends in `frame`, a function's frame address.
FLASHGEN_UNTRACED static std::uint32_t stack_number(void** frame) {
    std::uint64_t found[kTraceFrames] = {}, hash = 0;
    const auto base = reinterpret_cast<std::uint64_t>(__ehdr_start);
    for (int i = 0; i < kTraceFrames; ++i) {
        found[i] = reinterpret_cast<std::uint64_t>(frame[1]) - base;
        hash = (hash ^ found[i]) * 0x9E3779B97F4A7C15ull;
        void** const caller = static_cast<void**>(frame[0]);
        if (caller <= frame || !current->running_fiber().holds(caller + 1)) break;  // what is before a fiber's first frame is anything
        frame = caller;
    }
    const std::uint32_t first = hash >> 40;
    for (std::uint32_t slot = first; slot - first < kTraceStacks; ++slot) {
        std::uint64_t* const known = trace->stacks[slot % kTraceStacks];
        if (known[0] && std::memcmp(known, found, sizeof found)) continue;
        std::memcpy(known, found, sizeof found);
        return slot % kTraceStacks;
    }
    trace->count += trace->capacity;  // there is no room for this stack: the trace counts as too long
    return 0;
}
FLASHGEN_UNTRACED static std::uint8_t op_number(const char* op) {
    int i = 0;
    while (i < kTraceOps - 1 && trace->ops[i][0] && std::strncmp(trace->ops[i], op, kOpChars - 1)) ++i;
    std::strncpy(trace->ops[i], op, kOpChars - 1);
    return static_cast<std::uint8_t>(i);
}
FLASHGEN_UNTRACED static void add_record(const char* op, const void* address, std::uint32_t shared, int bytes, std::uint32_t mbarrier,
                                         bool written, void** frame) {
    const auto at = reinterpret_cast<std::uint64_t>(address);
    int operand = -1;
    for (int i = 0; i < current->options.extent_count && address; ++i)
        if (at - current->options.extents[i].address < current->options.extents[i].spans[0]) operand = i;
    if (address && operand < 0) return;
    const std::uint64_t number = trace->count++;
    if (number >= trace->capacity) return;
    TraceRecord& record = trace->records[number];
    record.offset = operand < 0 ? 0 : at - current->options.extents[operand].address;
    record.shared = shared, record.block = current->index, record.stack = stack_number(frame);
    record.thread = current->running, record.operand = operand;
    record.bytes = bytes, record.mbarrier = mbarrier, record.op = op_number(op), record.written = written;
}
FLASHGEN_UNTRACED static void touched(const void* address, int bytes, bool written, void** frame) {
    if (!trace || tracing || !current) return;
    tracing = true;
    add_record("global", address, 0, bytes, 0, written, frame);
    tracing = false;
}
FLASHGEN_UNTRACED static void note(const char* op, const void* address, std::uint32_t shared, int bytes, std::uint32_t mbarrier) {
    if (!trace || tracing || !current) return;
    tracing = true;
    add_record(op, address, shared, bytes, mbarrier, false, static_cast<void**>(__builtin_frame_address(0)));
    tracing = false;
}

}  // namespace emulator

// From here on what the launches of this process do is recorded in `memory`, of that many bytes.
extern "C" FLASHGEN_UNTRACED void flashgen_emulator_trace(void* memory, std::uint64_t bytes) {
    emulator::trace = static_cast<emulator::Trace*>(memory);
    emulator::trace->capacity = (bytes - sizeof(emulator::Trace)) / sizeof(emulator::TraceRecord);
    emulator::told = emulator::note;
}

// What compilers call, by the ABI of ThreadSanitizer.
#define FLASHGEN_ACCESS(name, bytes, written)                                                     \
    extern "C" FLASHGEN_UNTRACED void __tsan_##name##bytes(void* address) {                       \
        emulator::touched(address, bytes, written, (void**)__builtin_frame_address(0));           \
    }
#define FLASHGEN_ACCESSES(bytes)                   \
    FLASHGEN_ACCESS(read, bytes, false)            \
    FLASHGEN_ACCESS(write, bytes, true)            \
    FLASHGEN_ACCESS(unaligned_read, bytes, false)  \
    FLASHGEN_ACCESS(unaligned_write, bytes, true)
FLASHGEN_ACCESSES(1)
FLASHGEN_ACCESSES(2)
FLASHGEN_ACCESSES(4)
FLASHGEN_ACCESSES(8)
FLASHGEN_ACCESSES(16)
extern "C" FLASHGEN_UNTRACED void __tsan_read_range(void* address, unsigned long bytes) {
    emulator::touched(address, bytes, false, (void**)__builtin_frame_address(0));
}
extern "C" FLASHGEN_UNTRACED void __tsan_write_range(void* address, unsigned long bytes) {
    emulator::touched(address, bytes, true, (void**)__builtin_frame_address(0));
}
extern "C" FLASHGEN_UNTRACED void __tsan_init() {}
extern "C" FLASHGEN_UNTRACED void __tsan_func_entry(void*) {}
extern "C" FLASHGEN_UNTRACED void __tsan_func_exit() {}
extern "C" FLASHGEN_UNTRACED void __tsan_vptr_read(void*) {}
extern "C" FLASHGEN_UNTRACED void __tsan_vptr_update(void*, void*) {}
#define FLASHGEN_ATOMIC_SELF(bits, T, op, call) \
    extern "C" FLASHGEN_UNTRACED T __tsan_atomic##bits##_##op(volatile T* a, T x, int) { return call(a, x, 5); }
#define FLASHGEN_ATOMIC(bits, T) \
    extern "C" FLASHGEN_UNTRACED T __tsan_atomic##bits##_load(const volatile T* a, int) { return __atomic_load_n(a, 5); } \
    extern "C" FLASHGEN_UNTRACED void __tsan_atomic##bits##_store(volatile T* a, T x, int) { __atomic_store_n(a, x, 5); } \
    FLASHGEN_ATOMIC_SELF(bits, T, exchange, __atomic_exchange_n) \
    FLASHGEN_ATOMIC_SELF(bits, T, fetch_add, __atomic_fetch_add) \
    FLASHGEN_ATOMIC_SELF(bits, T, fetch_sub, __atomic_fetch_sub) \
    FLASHGEN_ATOMIC_SELF(bits, T, fetch_and, __atomic_fetch_and) \
    FLASHGEN_ATOMIC_SELF(bits, T, fetch_or, __atomic_fetch_or) \
    FLASHGEN_ATOMIC_SELF(bits, T, fetch_xor, __atomic_fetch_xor) \
    extern "C" FLASHGEN_UNTRACED int __tsan_atomic##bits##_compare_exchange_weak(volatile T* a, T* c, T x, int, int) { \
        return __atomic_compare_exchange_n(a, c, x, 1, 5, 5); \
    } \
    extern "C" FLASHGEN_UNTRACED int __tsan_atomic##bits##_compare_exchange_strong(volatile T* a, T* c, T x, int, int) { \
        return __atomic_compare_exchange_n(a, c, x, 0, 5, 5); \
    } \
    extern "C" FLASHGEN_UNTRACED T __tsan_atomic##bits##_compare_exchange_val(volatile T* a, T c, T x, int, int) { \
        __atomic_compare_exchange_n(a, &c, x, 0, 5, 5); \
        return c; \
    }
FLASHGEN_ATOMIC(8, unsigned char)
FLASHGEN_ATOMIC(32, unsigned int)
FLASHGEN_ATOMIC(64, unsigned long)
