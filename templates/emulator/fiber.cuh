// A fiber: a stack of its own, and how one thread of the operating system goes from stack to stack.

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdlib>

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

    void leave_for(Place& next) {
        start_switch(stack, next.stack);
        if (!_setjmp(registers)) _longjmp(next.registers, 1);
        finish_switch(next.stack, stack);
    }
};

class Fiber {
  public:
    Fiber() : memory(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
        if (memory == MAP_FAILED) std::perror("mmap of a fiber's stack"), std::abort();
        inside.stack.bottom = memory, inside.stack.bytes = kStackBytes;
    }
    ~Fiber() { munmap(memory, kStackBytes); }
    Fiber(const Fiber&) = delete;

    // The next resume() enters `function`, which never returns: in the end it suspends for good.
    void begin(void (*function)()) {
        entry = function;
        begun = false;
        inside.stack.saved = nullptr;
    }

    // On the stack of the scheduler: goes on with the fiber, until that suspends.
    void resume() {
        if (begun) return outside.leave_for(inside);
        begun = true;
        entered = this;
        start_switch(outside.stack, inside.stack);
        if (!_setjmp(outside.registers)) {
            ucontext_t first;  // a jump cannot enter a stack that nothing has left yet
            getcontext(&first);
            first.uc_stack.ss_sp = memory, first.uc_stack.ss_size = kStackBytes, first.uc_link = nullptr;
            makecontext(&first, enter, 0);
            setcontext(&first);
        }
        finish_switch(inside.stack, outside.stack);
    }

    // Whether eight bytes at this address are of the stack.
    bool holds(const void* address) const {
        const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - static_cast<const char*>(memory));
        return offset <= kStackBytes - 8;
    }

    // On the stack of the fiber: back to where it was resumed.
    void suspend() { inside.leave_for(outside); }

  private:
    static inline thread_local Fiber* entered = nullptr;

    void* memory;
    void (*entry)() = nullptr;
    bool begun = false;
    Place inside, outside;

    static void enter() {
        Fiber& self = *entered;
        finish_switch(self.outside.stack, self.inside.stack);
        self.entry();
    }
};

}  // namespace emulator
