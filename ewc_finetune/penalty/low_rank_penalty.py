"""Weights that adapters of low rank are trained for: the pull on what they are together, handed on to the adapters.

What is held is the effective weight, `W = W0 + U V`, around the anchor's, theta*: of `D = W - theta*` the penalty is
`1/2 <D, H D>`, and with `P = H D` its gradients are `P V^T` for U and `U^T P` for V. By Kronecker factors, `P = G D A`,
they are products of r rows or columns throughout, `G U (V A V^T)` and `(U^T G U) V A`, and no matrix of the weight's
size is made; what W0 is away from theta* (by quantization, or where adapters began elsewhere) is constant.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.errors import UsageError
from ewc_finetune.modules.adapters import Adapted, add_to
from ewc_finetune.modules.precision import sum_dtype
from ewc_finetune.penalty.held import Held


class HeldProduct(Held):
    """A weight that is held number by number, through its adapters: one matrix of its size is made at a time.

    Args:
        name: The weight's name.
        weight: The weight and what adds to it.
        curvature: `lambda F`.
        centre: `theta*`.
    """

    def __init__(self, name: str, weight: Adapted, curvature: Tensor, centre: Tensor) -> None:
        self.name = name
        self._weight = weight
        self.parameters = weight.parameters
        dtype = torch.promote_types(weight.base.dtype, centre.dtype)
        self.curvature = curvature.to(weight.base.device, dtype)
        away = weight.base.detach().to(dtype) - centre.to(weight.base.device, dtype)
        self._away = away if away.any() else None

    def value(self) -> float:
        """See `Held`."""
        dtype = sum_dtype(self.curvature.device)
        with torch.no_grad():
            return 0.5 * (self.curvature.to(dtype) * self._difference().to(dtype).square_()).sum().item()

    def trace(self) -> float:
        """See `Held`."""
        return self.curvature.sum(dtype=sum_dtype(self.curvature.device)).item()

    def largest(self) -> float:
        """See `Held`."""
        return self.curvature.max().item() if self.curvature.numel() else 0.0

    def add(self, scale: float | Tensor = 1.0, only: Collection[int] | None = None) -> None:
        """See `Held`."""
        if not self._weight.parts:
            self._through_graph(scale, only)
            return
        with torch.no_grad():
            u, v = self._weight.factors(self.curvature.dtype)
            pull = self._difference().mul_(self.curvature).mul_(scale).flatten(1)
            self._weight.add(pull @ v.T, u.T @ pull, only)

    def _through_graph(self, scale: float | Tensor, only: Collection[int] | None) -> None:
        with torch.enable_grad():
            delta = self._weight.delta()
        added = delta.detach().to(self.curvature.dtype)
        pull = (added if self._away is None else added + self._away) * self.curvature * scale
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        for parameter, gradient in zip(trained, torch.autograd.grad(delta, trained, pull.to(delta.dtype)), strict=True):
            add_to(parameter, gradient, only)

    def _difference(self) -> Tensor:
        """Return D, which may be written to."""
        if not self._weight.parts:
            added = self._weight.delta().detach().to(self.curvature.dtype, copy=True)
            return added if self._away is None else added.add_(self._away)
        u, v = self._weight.factors(self.curvature.dtype)
        if self._away is None:
            return (u @ v).reshape(self.curvature.shape)
        return torch.addmm(self._away.flatten(1), u, v).reshape(self.curvature.shape)


class HeldLowRankLayer(Held):
    """A layer that is held by Kronecker factors, through its adapters.

    Args:
        parts: Blocks, lambda in them, each with its centre, weight and bias as one matrix.
        weight: The layer's weight and what adds to it.
        bias: The layer's bias, if the blocks have it.

    Raises:
        UsageError: if what the adapters add is not of low rank.
    """

    def __init__(self, parts: Sequence[tuple[Block, Tensor]], weight: Adapted, bias: nn.Parameter | None) -> None:
        self.name = parts[0][0].weight
        if not weight.parts:
            raise UsageError(
                f"{self.name} is held by K-FAC, and what its adapters add is no product of two matrices, for it is a "
                "parameter of its own (target_parameters); take an anchor of a diagonal"
            )
        self._weight, self._bias = weight, bias
        self.parameters = weight.parameters + ([] if bias is None else [bias])
        dtype = torch.promote_types(weight.base.dtype, parts[0][1].dtype)
        like = torch.empty(0, dtype=dtype, device=weight.base.device)
        self._dtype, self._turned = dtype, parts[0][0].transposed
        self._blocks = [block.to(like) for block, _ in parts]
        self._terms = [block.terms() for block in self._blocks]
        self._bias_centres: list[Tensor] = []
        self._away: list[tuple[Tensor, Tensor] | None] = []
        for block, centre in zip(self._blocks, (centre.to(like) for _, centre in parts), strict=True):
            own = block.join(weight.base.detach().to(dtype), None if bias is None else bias.detach().to(dtype))
            away = own - centre
            if bias is not None:
                away[:, -1] = 0  # it may be trained, and is looked at each time
            self._bias_centres.append(centre[:, -1].clone())
            self._away.append((away, block.times(away)) if away.any() else None)

    @torch.no_grad()
    def value(self) -> float:
        """See `Held`."""
        total = 0.0
        for number, terms in enumerate(self._terms):
            u, v = self._factors(number)
            wide = sum_dtype(u.device)
            for a, g in terms:
                total += 0.5 * ((u.T @ g.before(u)).to(wide) * (a.after(v) @ v.T).to(wide)).sum().item()
            away = self._away[number]
            if away is not None:
                constant, pull = away
                total += (0.5 * (constant.to(wide) * pull.to(wide)).sum() + ((u.T @ pull) * v).to(wide).sum()).item()
        return total

    def trace(self) -> float:
        """See `Held`."""
        return sum(block.trace for block in self._blocks)

    def largest(self) -> float:
        """See `Held`."""
        return sum(block.largest() for block in self._blocks)

    @torch.no_grad()
    def add(self, scale: float | Tensor = 1.0, only: Collection[int] | None = None) -> None:
        """See `Held`."""
        for number, terms in enumerate(self._terms):
            u, v = self._factors(number)
            of_u, of_v = torch.zeros_like(u), torch.zeros_like(v)
            for a, g in terms:
                behind, before = a.after(v), g.before(u)
                of_u.addmm_(before, behind @ v.T)
                of_v.addmm_(u.T @ before, behind)
            away = self._away[number]
            if away is not None:
                of_u.addmm_(away[1], v.T)
                of_v.addmm_(u.T, away[1])
            self._hand_on(of_u.mul_(scale), of_v.mul_(scale), only)

    def _factors(self, number: int) -> tuple[Tensor, Tensor]:
        """Return U and V of D for one of the blocks: where there is a bias, what it is away is a product more."""
        u, v = self._weight.factors(self._dtype)
        if self._turned:
            u, v = v.T, u.T
        if self._bias is None:
            return u, v
        bias = self._bias.detach().to(self._dtype) - self._bias_centres[number]
        last = torch.zeros(1, v.shape[1] + 1, dtype=v.dtype, device=v.device)
        last[0, -1] = 1
        return torch.cat([u, bias[:, None]], dim=1), torch.cat([torch.cat([v, v.new_zeros(len(v), 1)], dim=1), last])

    def _hand_on(self, of_u: Tensor, of_v: Tensor, only: Collection[int] | None) -> None:
        """Add to the gradients of adapters and bias, by those of U and V."""
        if self._bias is not None:
            add_to(self._bias, of_u[:, -1], only)
            of_u, of_v = of_u[:, :-1], of_v[:-1, :-1]
        if self._turned:
            of_u, of_v = of_v.T, of_u.T
        self._weight.add(of_u, of_v, only)
