"""One call of a kernel on PyTorch's tensors: arguments checked, a program bound, launched on a GPU or in the emulator."""
