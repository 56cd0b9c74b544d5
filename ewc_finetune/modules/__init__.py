"""Torch modules and devices."""
