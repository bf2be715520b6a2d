// A fiber: a stack of its own, and how one thread of the operating system goes from stack to stack.

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdlib>

namespace host {

constexpr std::size_t kStackBytes = 256 * 1024;  // of address space; what a fiber does not use costs no memory

// Where a stack was left. A jump, unlike swapcontext, asks nothing of the operating system.
struct Place {
    jmp_buf registers;

    void leave_for(Place& next) {
        if (!_setjmp(registers)) _longjmp(next.registers, 1);
    }
};

class Fiber {
  public:
    Fiber() : stack(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
        if (stack == MAP_FAILED) std::perror("mmap of a fiber's stack"), std::abort();
    }
    ~Fiber() { munmap(stack, kStackBytes); }
    Fiber(const Fiber&) = delete;

    // The next resume() enters `function`, which never returns: in the end it suspends for good.
    void begin(void (*function)()) {
        entry = function;
        begun = false;
    }

    // On the stack of the scheduler: goes on with the fiber, until that suspends.
    void resume() {
        if (begun) return outside.leave_for(inside);
        begun = true;
        if (_setjmp(outside.registers)) return;
        ucontext_t first;  // a jump cannot enter a stack that nothing has left yet
        getcontext(&first);
        first.uc_stack.ss_sp = stack, first.uc_stack.ss_size = kStackBytes, first.uc_link = nullptr;
        makecontext(&first, entry, 0);
        setcontext(&first);
    }

    // On the stack of the fiber: back to where it was resumed.
    void suspend() { inside.leave_for(outside); }

  private:
    void* stack;
    void (*entry)() = nullptr;
    bool begun = false;
    Place inside, outside;
};

}  // namespace host
