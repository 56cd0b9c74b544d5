"""A loop under Accelerate with a model that is held by an anchor: one line, after `prepare`.

A small network learns scikit-learn's digits, and then the same digits turned by a quarter.

    pip install 'ewc-finetune[digits]' accelerate;  accelerate launch examples/accelerate_loop.py
"""

from __future__ import annotations

import copy

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ewc_finetune as ewc


def train(
    accelerator: Accelerator, model: nn.Module, data: TensorDataset, anchor: ewc.Anchor | None = None
) -> nn.Module:
    """The loop of Accelerate's own documentation, and one line more."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(data, 25, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if anchor is not None:
        ewc.Penalty(model, anchor, 10.0).attach(optimizer)
    for _ in range(15):
        for images, labels in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    return accelerator.unwrap_model(model)


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images / 16, dtype=torch.float32)
    labels = torch.tensor(load_digits().target)
    old, new = TensorDataset(images, labels), TensorDataset(images.rot90(dims=(1, 2)), labels)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = train(accelerator, network, old)
    anchor = ewc.consolidate(model, old, curvature="kfac")
    plain = train(accelerator, copy.deepcopy(model), new)
    held = train(accelerator, copy.deepcopy(model), new, anchor)
    for name, tuned in (("before", model), ("plain", plain), ("held", held)):
        kept, learned = ewc.evaluate(tuned, {"old": old, "new": new})
        accelerator.print(f"{name}: {kept.accuracy:.1%} of the digits, {learned.accuracy:.1%} of those that are turned")


if __name__ == "__main__":
    main()
