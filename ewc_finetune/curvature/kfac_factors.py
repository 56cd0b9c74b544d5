"""The two factors of a layer's block of the Fisher (K-FAC), collected while the gradients go by.

A layer takes vectors a (with a 1 behind them for its bias) to W a, and gets the gradient g back. One sample's gradient
is `sum_t g_t a_t^T` over its positions t, and the block of the Fisher is the mean of that matrix's outer product with
itself. K-FAC takes the mean of products for the product of means: `E[a a^T]` and `E[g g^T]` (Martens and Grosse 2015,
"Optimizing neural networks with Kronecker-factored approximate curvature"). It is exact for a layer with one position
if a and g are independent, as they are where all that follows is linear.

Where a layer has T positions there are two ways (Eschenhagen et al. 2023, "Kronecker-factored approximate curvature for
modern neural network architectures"): `expand` takes positions for samples, `E[mean_t a a^T]` and `E[sum_t g g^T]`;
`reduce` puts them together first, `E[ā ā^T]` with the mean of a, and `E[g g^T]` with the sum of g.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ewc_finetune.choices import KfacForm
from ewc_finetune.curvature.per_sample_gradients import Factored, chunks, sum_by_sample

# So many rows of a product that is symmetric are made at once: what lies right of them is their mirror image.
_PANEL = 192
# The most rows of a factor, which has as many as its layer has inputs or outputs: 0.5 GB in float64.
LARGEST = 8192


@dataclass(frozen=True)
class KfacLayer:
    """A weight that has a Kronecker-factored block, with the bias that is in it.

    Attributes:
        weight: Name of the parameter.
        bias: Name of the bias that is added to what the weight makes; None if there is none, or it has no curvature.
        transposed: Whether the weight's shape is `(inputs, outputs)`.
        inputs: Rows of the first factor, the bias's 1 included.
        outputs: Rows of the second.
        positions: How many vectors of a sample went in when the model was looked at.
    """

    weight: str
    bias: str | None
    transposed: bool
    inputs: int
    outputs: int
    positions: int


class BlockSums:
    """Collects the two factors of one layer, for one batch.

    Args:
        layer: The layer.
        use: The use of its weight.
        form: What is done with several positions.
        checked: A sample of which the gradient itself is wanted too, to compare it.
        mask: Which tokens of each sample are its own, not zero there, `(batch, tokens)`; a layer with as many positions
            takes the mean of `a` over those alone.

    Attributes:
        input: Sum over the samples of `a a^T`, as the form has it, up to the diagonal; see `mirrored`.
        output: Sum over samples and vectors of `g g^T`, also up to the diagonal; zero before the first.
        by_sample: Each sample's part of the trace of the block.
        norms: Sum over the vectors of the checked sample's squared gradients by the weight, and by the bias.
    """

    def __init__(
        self, layer: KfacLayer, use: Factored, form: KfacForm, checked: int | None, mask: Tensor | None = None
    ) -> None:
        self.layer = layer
        self._use = use
        self._form = form
        self._checked = checked
        self._mask = mask
        self.norms = [0.0, 0.0]
        self.input = torch.zeros(layer.inputs, layer.inputs, device=use.inputs.device)
        self.output = torch.zeros(layer.outputs, layer.outputs, device=use.inputs.device)
        self._of_inputs = self._sum_inputs()
        self.by_sample = torch.zeros_like(self._of_inputs)

    def _sum_inputs(self) -> Tensor:
        """Sum `a a^T`, and return each sample's part of its trace."""
        size = self.layer.inputs
        norms = []
        for samples in chunks(self._use.batch, size * self.layer.positions, self._use.inputs.device):
            a = self._use.input_vectors(samples)
            if self.layer.bias is not None:
                a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], dim=2)
            share = a.new_full((len(a), a.shape[1]), 1 / a.shape[1])
            if self._mask is not None and self._mask.shape == (self._use.batch, a.shape[1]):
                own = (self._mask[samples] != 0).to(a)
                share = own / own.sum(dim=1, keepdim=True).clamp(min=1)
            if self._form == "reduce":
                a = (a * share[..., None]).sum(dim=1, keepdim=True)
            else:
                a = a * share.sqrt()[..., None]
            self.input = _add_products(self.input, a.flatten(0, 1))
            norms.append(sum_by_sample(a.square()))
        return torch.cat(norms)

    def add(self, gradient: Tensor) -> None:
        """Take in the gradient of one vector at the outputs, batch first."""
        g = self._use.output_vectors(gradient)
        if self._form == "reduce" and g.shape[1] > 1:
            g = g.sum(dim=1, keepdim=True)
        self.output = _add_products(self.output, g.flatten(0, 1))
        self.by_sample += self._of_inputs * sum_by_sample(g.square())
        if self._checked is not None:
            one = slice(self._checked, self._checked + 1)
            parts = self._use.gradients(gradient, one), self._use.output_vectors(gradient[one]).sum(dim=1)
            self.norms = [n + part.square().sum().item() for n, part in zip(self.norms, parts, strict=True)]


def _add_products(total: Tensor, vectors: Tensor, scale: float = 1.0) -> Tensor:
    """Add `scale` times the sum of the vectors' outer products, up to the diagonal, and return the total."""
    total = total.to(vectors.dtype)
    for start in range(0, len(total), _PANEL):
        stop = start + _PANEL
        total[start:stop, :stop].addmm_(vectors[:, start:stop].T, vectors[:, :stop], alpha=scale)
    return total


def mirrored(total: Tensor) -> Tensor:
    """Return a symmetric matrix of which what is right of the diagonal was left out."""
    return total.tril() + total.tril(-1).T
