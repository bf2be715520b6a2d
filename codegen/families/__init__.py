"""One file per kernel family; each holds one `FAMILY`. A new file is found by itself."""
