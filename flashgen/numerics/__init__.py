"""What correct means: an oracle for each operation, and the rule that judges a kernel by it."""
