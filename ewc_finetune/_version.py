"""The package version, in the one place that has it."""

__version__ = "0.1.0"
