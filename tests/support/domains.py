"""Domains of little data."""

import torch
from torch.utils.data import TensorDataset


def blobs(shift=0.0, seed=0, n=120, classes=3):
    """A little classification problem: points around as many centres as there are classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    centres = 3 * torch.randn(classes, 4, generator=torch.Generator().manual_seed(7))
    return TensorDataset(centres[labels] + torch.randn(n, 4, generator=generator) + shift, labels)


def corners(seed=0, samples=60, shift=0, noise=0.5):
    """Three classes, each around a corner of its own among four; a shift moves them on by so many corners."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 3
    inputs = noise * torch.randn(samples, 4, generator=generator)
    inputs[torch.arange(samples), (labels + shift) % 4] += 2
    return TensorDataset(inputs, labels)


def noise(samples=40):
    """Four numbers in, and labels that have nothing to do with them."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 4, generator=generator), torch.arange(samples) % 3)


OLD, NEW = blobs(), blobs(shift=4.0, seed=1)
