"""Lightning's Trainer with a module that is held by an anchor: one callback.

A small network learns scikit-learn's digits, and then the same digits turned by a quarter.

    pip install 'ewc-finetune[lightning,digits]';  python examples/lightning_trainer.py
"""

from __future__ import annotations

import copy
import logging

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ewc_finetune as ewc
from ewc_finetune.integrations.lightning import EwcArguments, EwcCallback


class Digits(LightningModule):
    """A classifier of pictures of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.network(images)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(module: Digits, data: TensorDataset, *callbacks: EwcCallback) -> Digits:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    Trainer(max_epochs=15, accelerator="cpu", callbacks=[*callbacks], **quiet).fit(
        module, DataLoader(data, 50, shuffle=True, generator=torch.Generator().manual_seed(0))
    )
    return module


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
images = torch.tensor(load_digits().images / 16, dtype=torch.float32)
labels = torch.tensor(load_digits().target)
old, new = TensorDataset(images, labels), TensorDataset(images.rot90(dims=(1, 2)), labels)
module = train(Digits(), old)
anchor = ewc.consolidate(module, old, curvature="kfac")
plain = train(copy.deepcopy(module), new)
held = train(copy.deepcopy(module), new, EwcCallback(EwcArguments(anchors=[anchor])))
for name, tuned in (("before", module), ("plain", plain), ("held", held)):
    kept, learned = ewc.evaluate(tuned, {"old": old, "new": new})
    print(f"{name}: {kept.accuracy:.1%} of the digits, {learned.accuracy:.1%} of those that are turned")
