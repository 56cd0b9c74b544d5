"""The pull of an anchor in a training loop of one's own: one line around the loop.

The loop is any loop: what optimizer steps, and how batches are made, is its own affair. Prints what is kept of the old
domain and learned of the new one, without the pull and with it.

    python examples/own_loop.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ewc_finetune as ewc


def shapes(shift: float, seed: int) -> TensorDataset:
    """Three classes of points around centres of their own; a shift makes another domain of them."""
    labels = torch.arange(600) % 3
    noise = torch.randn(600, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(noise + 3 * nn.functional.one_hot((labels + int(shift)) % 8, 8), labels)


def train(model: nn.Module, data: TensorDataset, optimizer: torch.optim.Optimizer) -> None:
    for epoch in range(20):
        loader = DataLoader(data, batch_size=50, shuffle=True, generator=torch.Generator().manual_seed(epoch))
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def main() -> None:
    old, new = shapes(0, seed=0), shapes(3, seed=1)
    for held in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
        train(model, old, torch.optim.Adam(model.parameters(), lr=3e-3))
        anchor = ewc.consolidate(model, old)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        # Inside the block every step of the optimizer has the pull in it, once.
        with ewc.Penalty(model, anchor, 100.0 if held else 0.0).attach(optimizer) as attached:
            train(model, new, optimizer)
        scores = ewc.evaluate(model, {"old": old, "new": new})
        print(
            f"{'held' if held else 'plain'}: old domain {scores['old'].accuracy:.1%}, new domain "
            f"{scores['new'].accuracy:.1%}, penalty {attached.penalty.value():.3f}"
        )


if __name__ == "__main__":
    main()
