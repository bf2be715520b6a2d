"""The artifact store: compiled kernels on disk."""
