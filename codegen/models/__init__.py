"""Models of kernel families: one file per family that predicts how long a config takes, and says what sets the time."""
