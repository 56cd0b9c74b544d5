"""Which of torch's operators a program from a file may call: those that compute, on what they are given."""

from __future__ import annotations

from functools import cache

import torch

# Where the operators of programs come from that torch writes; each of these computes, but for what is named below.
_NAMESPACES = ("aten", "prims", "torchvision")
# Of `prim` those that look at values or end the program; the others call elsewhere, print, or are of torch's passes.
_OF_PRIM = frozenset(
    """
    Uninitialized NumToTensor RaiseException EnumName EnumValue TupleIndex TupleUnpack StringIndex IfThenElse
    ModuleContainerIndex abs data device dtype grad index is_contiguous is_cpu is_cuda is_ipu is_maia is_meta
    is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout
    max min name nbytes rangelist requires_grad shape tolist type unchecked_cast unchecked_unwrap_optional
    """.split()
)
# They read or write a file, print, or move generators that everybody shares.
_REFUSED = frozenset({"save", "from_file", "_print", "manual_seed", "seed", "_cufft_set_plan_cache_max_size"})
# What texts may be for. An operator that takes a text for anything else is refused: it may name a file.
_TEXTS = frozenset(
    """
    UPLO a activation algorithm api_name approximate assert_msg b chars cls device_type dict driver el equation
    fillchar idx ind indexing input inputs interpolation item key l message mode msg new norm old ord p pad_mode
    padding padding_side reduce rounding_mode s self separator side string substr t to_add type values
    """.split()
)


@cache
def is_computation(namespace: str, name: str) -> bool:
    """Whether an operator, with all its overloads, only computes.

    Args:
        namespace: As in `torch.ops`.
        name: Without overload.
    """
    if namespace == "prim":
        return name in _OF_PRIM
    if namespace not in _NAMESPACES or name in _REFUSED:
        return False
    if namespace == "torchvision":
        import torchvision  # noqa: F401 - registers its operators
    schemas = torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}")
    texts = {argument.name for schema in schemas for argument in schema.arguments if "str" in str(argument.type)}
    return bool(schemas) and texts <= _TEXTS


def touches_files(name: str) -> bool:
    """Whether an operator of that name, called as a method, would do what none may."""
    return name in _REFUSED
