"""A small classifier, and weights that look lived in."""

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
