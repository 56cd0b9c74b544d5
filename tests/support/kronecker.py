"""K-FAC anchors of random data, and their blocks as dense float64 matrices."""

from dataclasses import replace

import torch
from torch import nn

from ewc_finetune import Anchor, Provenance, compute_fisher
from ewc_finetune.curvature.kronecker_factors import DenseFactor, EighDecomposed
from ewc_finetune.likelihood.registry import get_likelihood


def dense():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 4))


def psd(n, seed):
    x = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return DenseFactor(x @ x.T / n)


def whole(block):
    """The block as a matrix in float64, pair by pair of the factors' directions."""
    a, g = block.input, block.output
    if not (isinstance(a, EighDecomposed) and isinstance(g, EighDecomposed)):
        return torch.kron(g.matrix().double(), a.matrix().double())
    (one, e, r), (other, f, s) = (directions(factor) for factor in (a, g))
    pairs = torch.outer(f, e)
    narrow_is_input = r <= s
    table, n, m = (pairs, s, r) if narrow_is_input else (pairs.T, r, s)
    # What the narrower one leaves: of these columns only rows with large enough pairs count by themselves.
    own = max(1, int((table[:n, -1] >= table[n - 1, m - 1]).sum()))
    while own < n and table[own:, m:].sum() > 0.05 * table.sum():
        own += 1
    if own < n and m < table.shape[1]:
        table[own:, m:] = table[own:, m:].mean()
    basis = torch.kron(other, one)
    return (basis * pairs.flatten()) @ basis.T


def directions(factor):
    """All eigenvectors of a cut factor, one to a column, their eigenvalues, and how many were kept."""
    vectors, kept = factor.vectors.double(), len(factor.eigenvalues)
    rest = torch.linalg.svd(vectors, full_matrices=True).U[:, kept:]
    values = torch.full((factor.size,), factor.rest, dtype=torch.float64)
    values[:kept] = factor.eigenvalues.double()
    return torch.cat([vectors, rest], dim=1), values, kept


def make_anchor(model, seed, form="expand", truncate=None):
    """An anchor near a model with the K-FAC blocks of random data."""
    shape = (6,) if isinstance(model[0], nn.Linear) else (2, 7, 7)
    inputs = torch.randn(8, *shape, generator=torch.Generator().manual_seed(seed)).to(model[0].weight.dtype)
    found = compute_fisher(model, [(inputs, None)], get_likelihood("categorical"), kfac=form)
    generator = torch.Generator().manual_seed(seed)
    weights = {n: p.detach() + 0.1 * torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
    blocks = found.blocks
    if truncate is not None:
        blocks = [
            replace(b, input=b.input.truncated(truncate), output=b.output.truncated(truncate)) for b in found.blocks
        ]
    blocks = {block.layer: block.to(torch.empty(0)) for block in blocks}
    return Anchor(weights, {}, {}, Provenance(f"domain {seed}", curvature="kfac"), blocks=blocks)
