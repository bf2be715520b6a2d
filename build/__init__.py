"""From text to a loaded kernel: compiler, artifact store, driver. cuda-python and numpy; nothing here imports PyTorch."""
