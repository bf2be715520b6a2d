"""What modifiers mean, for the oracles: one file each, of the name that it has in `codegen/modifiers`."""
