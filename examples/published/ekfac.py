"""Would corrected eigenvalues help? K-FAC against EKFAC (George et al. 2018) on MNIST, then Fashion-MNIST.

K-FAC takes the products of its factors' eigenvalues for the curvature along the products of their eigenvectors. EKFAC
measures it there instead: the mean square of each sample's gradient in that basis, as many numbers as the layer has
weights. Here both pull in one training loop, in the gradient form, on the network of mnist_to_fmnist.py, seed 0.

    python examples/published/ekfac.py            about 6 minutes

Writes ekfac.md to --output (the folder ekfac beside this file).
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor, nn

import ewc_finetune as ewc
from ewc_finetune.checkpoint.builtin_models import MLP
from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.data.sources import load_domain

TRAINING = (1e-4, 4)  # learning rate of Adam, epochs
LAMBDAS = (1.0, 3.0, 10.0, 30.0)


class Basis:
    """A layer's block in its eigenbasis.

    Attributes:
        block: The layer's, whole.
        output: Eigenvectors of its output factor, one to a column.
        input: Likewise.
        kfac: Curvature along their products, `(outputs, inputs)`, by the factors' eigenvalues.
        ekfac: Likewise, as measured; filled in by `correct`.
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        g, a = block.output.eigen(), block.input.eigen()
        self.output, self.input = g.vectors, a.vectors
        self.kfac = torch.outer(g.eigenvalues, a.eigenvalues)
        self.ekfac = torch.zeros_like(self.kfac)

    def pull(self, curvature: Tensor, difference: Tensor) -> Tensor:
        """Return the gradient of the quadratic."""
        return self.output @ (curvature * (self.output.T @ difference @ self.input)) @ self.input.T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="where MNIST and FashionMNIST lie (default: $EWC_FT_DATA)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(""), help="folder")
    parser.add_argument("--quick", action="store_true", help="little data: shows that it runs, no result")
    options = parser.parse_args()
    limit = "?limit=200" if options.quick else ""
    data = {
        (name, split): vectors(f"{name}{limit}", split, options.data_dir)
        for name in ("mnist", "fmnist")
        for split in ("train", "test")
    }
    torch.manual_seed(0)
    start = MLP(784, (256, 128), 10)
    ewc.finetune(start, f"mnist{limit}", norm_stats="update", eval_on=[], data_dir=options.data_dir)
    start.eval()
    samples = 100 if options.quick else 10_000
    anchor = ewc.consolidate(
        start, f"mnist{limit}", curvature="kfac", kfac_rank="full", samples=samples, data_dir=options.data_dir
    )
    bases = {layer: Basis(block) for layer, block in anchor.blocks.items()}
    order = torch.randperm(len(data["mnist", "train"][0]), generator=torch.Generator().manual_seed(0))
    correct(bases, start, data["mnist", "train"][0][order[:samples]])
    rows = ["| lambda | K-FAC: MNIST | Fashion-MNIST | EKFAC: MNIST | Fashion-MNIST |", "|---|---|---|---|---|"]
    for strength in LAMBDAS[:1] if options.quick else LAMBDAS:
        cells = []
        for form in ("kfac", "ekfac"):
            model = adapt(start, anchor, bases, form, strength, data["fmnist", "train"], *TRAINING)
            cells += [f"{accuracy(model, *data[name, 'test']):.4f}" for name in ("mnist", "fmnist")]
        rows.append(f"| {strength:g} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    table = "\n".join(rows) + "\n"
    (options.output / "ekfac.md").write_text(table)
    print(f"\n{table}")


def vectors(data: str, split: str, folder: Path | None) -> tuple[Tensor, Tensor]:
    """Return images as vectors between 0 and 1, and labels."""
    inputs, labels = load_domain(data, split, folder).samples.tensors
    return inputs.flatten(1).float() / 255, labels


def correct(bases: dict[str, Basis], model: nn.Module, inputs: Tensor) -> None:
    """Measure the curvature along the eigenvectors' products: `E[(u^T g)^2 (v^T a)^2]`, exact over the classes."""
    met: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _, given, made, name=name: met.update({name: (given[0].detach(), made)})
        )
        for name in bases
    ]
    for part in inputs.split(500):
        outputs = model(part)
        p = outputs.detach().softmax(dim=1)
        squares = dict.fromkeys(bases, torch.zeros(()))
        for c in range(p.shape[1]):
            score = (nn.functional.one_hot(torch.tensor(c), p.shape[1]) - p) * p[:, c : c + 1].sqrt()
            gradients = torch.autograd.grad(outputs, [met[name][1] for name in bases], score, retain_graph=True)
            for (name, basis), g in zip(bases.items(), gradients, strict=True):
                squares[name] = squares[name] + (g @ basis.output).square()
        for name, basis in bases.items():
            a = torch.cat([met[name][0], torch.ones(len(part), 1)], dim=1)
            basis.ekfac += squares[name].T @ (a @ basis.input).square() / len(inputs)
    for hook in hooks:
        hook.remove()


def adapt(
    start: nn.Module,
    anchor: ewc.Anchor,
    bases: dict[str, Basis],
    form: str,
    strength: float,
    data: tuple[Tensor, Tensor],
    lr: float,
    epochs: int,
) -> nn.Module:
    """Train on the new domain under the blocks in one of the forms, and the diagonal of the rest."""
    model = copy.deepcopy(start)
    rest = ewc.Penalty(model, anchor.without([basis.block.weight for basis in bases.values()]), strength)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(len(data[0]), generator=generator).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data[0][chosen]), data[1][chosen]).backward()
            rest.add_gradient()
            with torch.no_grad():
                for basis in bases.values():
                    held = [parameters[name] for name in basis.block.names]
                    difference = basis.block.join(
                        *(p - anchor.weights[n] for p, n in zip(held, basis.block.names, strict=True))
                    )
                    pull = strength * basis.pull(getattr(basis, form), difference)
                    for p, part in zip(held, basis.block.split(pull, held[0].shape), strict=True):
                        p.grad += part
            optimizer.step()
    return model


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(inputs).argmax(dim=1) == labels).float().mean().item()


if __name__ == "__main__":
    main()
