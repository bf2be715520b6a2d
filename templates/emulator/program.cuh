// The text as a program of its own, for sanitizers and debuggers: `program LAUNCH RESULTS` reads a launch from one file, gives each tensor
// an allocation of its own, so that nothing lies beside it, runs the blocks, and writes all tensors to the other file.

#ifdef FLASHGEN_SANITIZED
extern "C" void __asan_poison_memory_region(const volatile void* begin, std::size_t bytes);
extern "C" void* __asan_get_report_address();
#else
inline void __asan_poison_memory_region(const volatile void*, std::size_t) {}
#endif

namespace emulator {

constexpr std::size_t kGap = 1 << 20;  // bytes before and after a tensor that nobody may touch; a sanitizer's red zones are far narrower

// How the file begins. Then come the tensors' names and sizes, the fields of their addresses, the parameters, and the tensors' bytes.
struct LaunchFile {
    std::int32_t threads, shared_bytes, parameter_bytes, tensors;
    std::int32_t checked;  // atoms may read this many tensors, the first ones, and read and write the others; 0 leaves that to a sanitizer
    std::int32_t schedule, late_copies, first_block, blocks;
    std::int32_t fields, kernel, cluster;  // kernel: its number in the text
    std::uint64_t seed;
};

// Where the address of a tensor goes among the parameters: a pointer, or the first word of a tensor map.
struct AddressField {
    std::int32_t offset, tensor;
};

struct Tensor {
    char name[16];
    std::uint64_t bytes;
    unsigned char* data;  // null in the file
};

inline std::vector<Tensor> tensors;

inline void require(bool well, const char* what, const char* path) {
    if (well) return;
    std::fprintf(stderr, "%s %s\n", what, path);
    std::exit(2);
}

inline unsigned char* allocate(std::size_t bytes) {
    auto* const gap = static_cast<unsigned char*>(std::malloc(kGap + bytes + kGap));
    __asan_poison_memory_region(gap, kGap);
    __asan_poison_memory_region(gap + kGap + bytes, kGap);
    return gap + kGap;
}

inline int run_program(const char* launch_path, const char* results_path) {
    std::FILE* file = std::fopen(launch_path, "rb");
    require(file, "cannot open", launch_path);
    auto read = [&](void* to, std::size_t bytes) { require(std::fread(to, 1, bytes, file) == bytes, "too short:", launch_path); };
    LaunchFile launch;
    read(&launch, sizeof launch);
    tensors.resize(launch.tensors);
    read(tensors.data(), tensors.size() * sizeof(Tensor));
    std::vector<AddressField> fields(launch.fields);
    read(fields.data(), fields.size() * sizeof(AddressField));
    struct alignas(64) Line {
        unsigned char bytes[64];  // tensor maps want them aligned
    };
    std::vector<Line> lines((launch.parameter_bytes + 63) / 64);
    unsigned char* const parameters = lines.data()->bytes;
    read(parameters, launch.parameter_bytes);
    std::vector<Extent> extents;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        Tensor& tensor = tensors[i];
        tensor.data = allocate(tensor.bytes);
        read(tensor.data, tensor.bytes);
        if (!launch.checked) continue;
        Extent extent{};
        extent.address = bits_as<std::uintptr_t>(tensor.data), extent.spans[0] = tensor.bytes;
        extent.writable = static_cast<int>(i) >= launch.checked;
        std::memcpy(extent.name, tensor.name, sizeof extent.name);
        extents.push_back(extent);
    }
    for (const AddressField& field : fields) std::memcpy(parameters + field.offset, &tensors[field.tensor].data, sizeof(void*));
    std::fclose(file);

    Options options{};
    options.extents = extents.data(), options.extent_count = static_cast<int>(extents.size());
    options.seed = launch.seed, options.schedule = launch.schedule, options.late_copies = launch.late_copies;
    options.workers = 1;
    const Launch chosen{parameters,         launch.kernel, launch.threads, launch.shared_bytes,
                        launch.first_block, launch.blocks, launch.cluster, launch.cluster, 0};
    char check[100], message[4096];
    if (flashgen_emulator_run(&chosen, 1, &options, check, message, sizeof message)) {
        std::fflush(stdout);
        std::fprintf(stderr, "%s\n%s\n", check, message);
        return 3;
    }
    file = std::fopen(results_path, "wb");
    require(file, "cannot open", results_path);
    for (const Tensor& tensor : tensors)
        require(std::fwrite(tensor.data, 1, tensor.bytes, file) == tensor.bytes, "cannot write", results_path);
    require(std::fclose(file) == 0, "cannot write", results_path);
    return 0;
}

#ifdef FLASHGEN_SANITIZED
// The beginning of a sanitizer's report: the thread of the kernel, of which the sanitizer knows nothing.
inline void say_which_thread() {
    std::fflush(stdout);
    if (current)
        std::fprintf(stderr, "block %d: thread %d (warp %d, lane %d)\n", current->index, current->running, current->running / kLanes,
                     current->running % kLanes);
}
// And how far from which tensor the bad address is, if it lies in a gap.
inline void say_which_tensor(std::uintptr_t address) {
    for (const Tensor& tensor : tensors) {
        const std::uintptr_t begin = bits_as<std::uintptr_t>(tensor.data), end = begin + tensor.bytes;
        if (address >= end && address < end + kGap)
            std::fprintf(stderr, "%llu bytes past the end of %s\n", static_cast<unsigned long long>(address - end), tensor.name);
        if (address < begin && address >= begin - kGap)
            std::fprintf(stderr, "%llu bytes before the begin of %s\n", static_cast<unsigned long long>(begin - address), tensor.name);
    }
}
#endif

}  // namespace emulator

#ifdef FLASHGEN_SANITIZED
// Called by the sanitizers. Fibers that a fault leaves behind are no leaks worth a report.
extern "C" const char* __asan_default_options() { return "detect_leaks=0:detect_stack_use_after_return=0"; }
extern "C" void __asan_on_error() {
    emulator::say_which_thread();
    emulator::say_which_tensor(bits_as<std::uintptr_t>(__asan_get_report_address()));
}
extern "C" void __ubsan_on_report() { emulator::say_which_thread(); }
#endif

int main(int count, char** arguments) {
    if (count == 3) return emulator::run_program(arguments[1], arguments[2]);
    std::fprintf(stderr, "usage: %s LAUNCH RESULTS\n", arguments[0]);
    return 2;
}
