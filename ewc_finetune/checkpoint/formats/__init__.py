"""The formats that checkpoints are in."""
