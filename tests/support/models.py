"""A small classifier, weights that look lived in, and what goes in and comes out of models."""

import warnings
from contextlib import contextmanager

import torch
from torch import nn


class Small(nn.Module):
    """A little of everything that a classifier may have: 4 numbers in, 3 classes out."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x)).tanh()))


def trained(model, dtype=torch.float64, seed=0):
    """Give a model weights and statistics that look lived in."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.data = buffer.data.abs() + 0.5
    return model.to(dtype).eval()


def example(model, samples):
    """Inputs for `Small`, or images."""
    torch.manual_seed(1)
    return torch.randn(samples, 4) if isinstance(model, Small) else torch.randn(samples, 3, 32, 32)


def outputs(model, inputs):
    with torch.no_grad():
        return model(inputs)


@contextmanager
def quiet():
    """Without torch's remarks on its older interfaces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
