"""Whether a kernel is right: the numerics rule on awkward cases, on a GPU and in the emulator."""
