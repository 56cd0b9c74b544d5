"""Checkpoints: the formats models are deployed in, and the architectures their weights belong to."""
