"""One file for each operation: what is computed, whatever family of kernels does it."""
