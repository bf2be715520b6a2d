"""How fast a kernel is: the one protocol of timing, and the kernels that are timed by it."""
