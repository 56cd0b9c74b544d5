"""The diagonal Fisher in half precision, a power of two to each tensor, so that nothing overflows or vanishes.

What is stored is `fisher / scale`. The scale brings a tensor's largest value near the top of what float16 has; a value
that even so is too small for it becomes the smallest that it has, for a parameter without curvature would be free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ewc_finetune.anchor.describe import storage
from ewc_finetune.choices import CURVATURE_DTYPES, CurvatureDtype, check_choice
from ewc_finetune.errors import NonFiniteError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# The largest power of two that float16 has, and the smallest that float32 has in full precision.
_TOP = 15
_LEAST = -126


@dataclass(frozen=True)
class Storage:
    """In what precision a diagonal is stored, and what that costs.

    Attributes:
        dtype: Its name.
        error: Norm of the rounding errors, relative to that of the Fisher.
        raised: How many values were too small (below 2^-40 of their tensor's largest in float16), and became the
            smallest that there is.
    """

    dtype: str
    error: float
    raised: int

    @property
    def sentence(self) -> str:
        """What it is, in words."""
        return storage(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return it in values that JSON has."""
        return asdict(self)


def encode(fisher: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Return a tensor of a Fisher as it is stored, and its scale; what was decoded gives the same again.

    Args:
        fisher: In float32, without negative values.
        dtype: `bfloat16` or `float16`.

    Returns:
        The values in that dtype, same shape, and the scale in float32, shape `()`.
    """
    half = _DTYPES[dtype]
    # What would be rounded to 2^128, which float32 does not have, is rounded down.
    capped = fisher.double().clamp(max=(2 - torch.finfo(half).eps) * 2.0**127)
    top = float(capped.max()) if fisher.numel() else 0.0
    # By the largest value as it will be when it is rounded, which may be the next power of two.
    mantissa, exponent = math.frexp(top)
    _, more = math.frexp(float(torch.tensor(mantissa, dtype=torch.float64).to(half)))
    power = max(exponent + more - _TOP, _LEAST) if top else 0
    stored = (capped * 2.0**-power).to(half)
    stored[(stored == 0) & (fisher > 0)] = torch.finfo(half).smallest_normal * torch.finfo(half).eps
    return stored, torch.tensor(2.0**power, dtype=torch.float32)


def decode(stored: Tensor, scale: Tensor) -> Tensor:
    """Return a tensor of a Fisher in float32 from what is stored."""
    return stored.float() * scale.float()


def rounded(fisher: Mapping[str, Tensor], dtype: CurvatureDtype) -> tuple[dict[str, Tensor], Storage | None]:
    """Return a Fisher as it will be read back when it is stored in a dtype, and what that costs; None for float32.

    Raises:
        NonFiniteError: naming a tensor with NaN or infinity.
    """
    check_choice("curvature dtype", dtype, CURVATURE_DTYPES)
    if dtype == "float32":
        return dict(fisher), None
    read_back = {}
    off, norm, raised = 0.0, 0.0, 0
    for name, value in fisher.items():
        if not value.isfinite().all():
            raise NonFiniteError(f"fisher.{name} holds NaN or infinity, which half precision would hide")
        stored, scale = encode(value, dtype)
        read_back[name] = decode(stored, scale)
        exact = value.double()
        off += float((read_back[name].double() - exact).square().sum())
        norm += float(exact.square().sum())
        raised += int(((exact / float(scale)).to(stored.dtype) == 0).logical_and(exact > 0).sum())
    return read_back, Storage(dtype, math.sqrt(off / norm) if norm else 0.0, raised)
