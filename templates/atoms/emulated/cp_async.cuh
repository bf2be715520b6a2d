// Asynchronous copies from global to shared memory. By the launch's choice they take place as early as may be, when they are issued, or as
// late, when they are waited for. Until then nobody may touch their destination.

namespace emulator {

void issue(SharedAddress destination, const void* source, int bytes = 16);
void wait_groups(int pending);

}  // namespace emulator

inline void cp_async_16(SharedAddress destination, const void* source, bool valid) {
    emulator::issue(destination, valid ? source : nullptr);
}

inline void cp_async_16(SharedAddress destination, const void* source) { emulator::issue(destination, source); }

inline void cp_async_4(SharedAddress destination, const void* source) { emulator::issue(destination, source, 4); }

void cp_async_commit_group();

template <int kPending>
inline void cp_async_wait_group() { emulator::wait_groups(kPending); }
