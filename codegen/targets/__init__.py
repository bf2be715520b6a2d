"""One file per architecture; each holds one `TARGET`. A new file is found by itself."""
