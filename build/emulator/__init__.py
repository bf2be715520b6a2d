"""Kernels on the CPU: the emulator's compiler, and what loads and launches what it makes."""
