"""The anchor file."""
