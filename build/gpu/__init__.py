"""Kernels on a GPU, through the driver."""
