"""One folder per kernel family; each holds one `FAMILY`. A new one is found by itself."""
