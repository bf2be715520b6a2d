// How a fiber is entered, left and resumed: see emulator/fiber.cuh.

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>

namespace emulator {

void Place::leave_for(Place& next) {
    start_switch(stack, next.stack);
    if (!_setjmp(registers)) _longjmp(next.registers, 1);
    finish_switch(next.stack, stack);
}

Stacks::Stacks(int count)
    : bytes(count * kStackBytes), memory(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (memory == MAP_FAILED) std::perror("mmap of stacks of fibers"), std::abort();
}

Stacks::~Stacks() { munmap(memory, bytes); }

void Fiber::begin(void* stack, void (*function)()) {
    entry = function;
    begun = false;
    inside.stack = {stack, kStackBytes, nullptr};
}

void Fiber::resume() {
    if (begun) return outside.leave_for(inside);
    begun = true;
    entered = this;
    start_switch(outside.stack, inside.stack);
    if (!_setjmp(outside.registers)) {
        ucontext_t first;  // a jump cannot enter a stack that nothing has left yet
        getcontext(&first);
        first.uc_stack.ss_sp = const_cast<void*>(inside.stack.bottom), first.uc_stack.ss_size = kStackBytes, first.uc_link = nullptr;
        makecontext(&first, enter, 0);
        setcontext(&first);
    }
    finish_switch(inside.stack, outside.stack);
}

bool Fiber::holds(const void* address) const {
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - static_cast<const char*>(inside.stack.bottom));
    return offset <= kStackBytes - 8;
}

void Fiber::suspend() { inside.leave_for(outside); }

void Fiber::enter() {
    Fiber& self = *entered;
    finish_switch(self.outside.stack, self.inside.stack);
    self.entry();
}

}  // namespace emulator
