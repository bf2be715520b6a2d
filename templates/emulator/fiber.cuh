// A fiber: a stack of its own, and how one thread of the operating system goes from stack to stack.

#include <setjmp.h>

#include <cstddef>

namespace emulator {

constexpr std::size_t kStackBytes = 256 * 1024;  // of address space; what a fiber does not use costs no memory

// A stack, as a sanitizer knows it.
struct Stack {
    const void* bottom = nullptr;
    std::size_t bytes = 0;
    void* saved = nullptr;  // the sanitizer's own
};

// A sanitizer is told before each switch which stack comes next, and after it that the stack has come.
#ifdef FLASHGEN_SANITIZED
extern "C" void __sanitizer_start_switch_fiber(void** saved, const void* bottom, std::size_t bytes);
extern "C" void __sanitizer_finish_switch_fiber(void* saved, const void** last_bottom, std::size_t* last_bytes);

inline void start_switch(Stack& from, const Stack& to) { __sanitizer_start_switch_fiber(&from.saved, to.bottom, to.bytes); }
inline void finish_switch(Stack& from, const Stack& to) { __sanitizer_finish_switch_fiber(to.saved, &from.bottom, &from.bytes); }
#else
inline void start_switch(Stack&, const Stack&) {}
inline void finish_switch(Stack&, const Stack&) {}
#endif

// Where a stack was left. A jump, unlike swapcontext, asks nothing of the operating system.
struct Place {
    jmp_buf registers;
    Stack stack;

    void leave_for(Place& next);
};

// The stacks of a block's fibers. They are one mapping: making and dropping hundreds would take longer than most launches.
class Stacks {
  public:
    explicit Stacks(int count);
    ~Stacks();
    Stacks(const Stacks&) = delete;

    void* of(int fiber) const { return static_cast<char*>(memory) + fiber * kStackBytes; }

  private:
    std::size_t bytes;
    void* memory;
};

class Fiber {
  public:
    // The next resume() enters `function` on the stack, and it never returns: in the end it suspends for good.
    void begin(void* stack, void (*function)());

    // On the stack of the scheduler: goes on with the fiber, until that suspends.
    void resume();

    // Whether eight bytes at this address are of the stack.
    bool holds(const void* address) const;

    // On the stack of the fiber: back to where it was resumed.
    void suspend();

  private:
    static inline thread_local Fiber* entered = nullptr;

    void (*entry)() = nullptr;
    bool begun = false;
    Place inside, outside;

    static void enter();
};

}  // namespace emulator
