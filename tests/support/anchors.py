"""Diagonal anchors of random numbers, and what a stack of them pulls with by definition."""

import torch
from hypothesis import strategies as st

from ewc_finetune import Anchor, Provenance


def make_anchor(model, seed, *, zeros=0.0, missing=(), digest=None, **provenance):
    """An anchor near a model's weights with a random Fisher; some of it zero, some parameters without any."""
    generator = torch.Generator().manual_seed(seed)
    weights, fisher = {}, {}
    for name, p in model.named_parameters():
        weights[name] = (p.detach() + torch.randn(p.shape, generator=generator)).to(p.dtype)
        values = torch.rand(p.shape, generator=generator)
        fisher[name] = values * (torch.rand(p.shape, generator=generator) >= zeros)
    for name in missing:
        del fisher[name]
    return Anchor(weights, fisher, {}, Provenance(name=f"domain {seed}", **provenance), digest=digest)


def loop_over_anchors(model, anchors, lambdas):
    """The definition: sum over anchors and parameters of lambda/2 F (theta - theta*)^2, differentiable, float64."""
    parameters = dict(model.named_parameters())
    total = torch.zeros((), dtype=torch.float64)
    for anchor, lam in zip(anchors, lambdas, strict=True):
        for name, fisher in anchor.fisher.items():
            difference = parameters[name].double() - anchor.weights[name].double()
            total = total + lam / 2 * (fisher.double() * difference**2).sum()
    return total


stacks = st.lists(
    st.tuples(
        st.integers(0, 1000),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.sets(st.sampled_from(["first.weight", "first.bias", "norm.weight", "last.bias"])),
        st.one_of(st.just(0.0), st.floats(1e-6, 1e6)),
    ),
    min_size=1,
    max_size=4,
)
