"""The version: the one place that holds it. The build reads it from here, and so does `flashgen.__version__`."""

__version__ = "0.1.0"
