"""Sweeps: many fine-tunes in a folder."""
