"""Which of torch's operators a program from a file may call: those that compute, within the bounds of their inputs."""

from __future__ import annotations

from functools import cache

import torch

# Operators of `prim` that look at values or end the program. Its others call other code, print, or belong to torch's
# passes over a graph.
_OF_PRIM = frozenset(
    """
    Uninitialized NumToTensor RaiseException EnumName EnumValue TupleIndex TupleUnpack StringIndex IfThenElse
    ModuleContainerIndex abs data device dtype grad index is_contiguous is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn
    is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout max min name
    nbytes rangelist requires_grad shape tolist type unchecked_cast unchecked_unwrap_optional
    """.split()
)
# Operators with an underscore in front that are allowed. The others are internal to torch; some check no bounds.
_INNER = frozenset(
    """
    __and__ __contains__ __derive_index __getitem__ __interpolate __is__ __isnot__ __lshift__ __not__ __or__
    __range_length __round_to_zero_floordiv __rshift__ __upsample __xor__ _adaptive_avg_pool2d _adaptive_avg_pool3d
    _add_relu _assert_async _assert_scalar _assert_tensor_metadata _cast_Byte _cast_Char _cast_Double _cast_Float
    _cast_Half _cast_Int _cast_Long _cast_Short _conj _convolution _convolution_mode _cummax_helper _fused_dropout
    _fused_rms_norm _get_tracing_state _grid_sampler_2d_cpu_fallback _infer_size _log_softmax
    _native_batch_norm_legit _native_batch_norm_legit_no_training _native_multi_head_attention _pack_padded_sequence
    _pad_circular _pad_enum _pad_packed_sequence _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention_for_cpu _set_item _shape_as_tensor _size_if_not_equal _softmax _stack
    _thnn_fused_gru_cell _thnn_fused_lstm_cell _to_copy _transformer_encoder_layer_fwd _trilinear _unsafe_index
    _unsafe_view _unwrap_optional _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm
    _weight_norm_interface
    """.split()
)
# Operators that read or write files, another tensor's memory or global state, or print, and those that make characters
# of numbers: texts may be printed, and are only checked where they stand in the code.
_REFUSED = frozenset(
    """
    backward chr percentFormat save from_file manual_seed seed initial_seed set_grad_enabled set_ set set_data
    resize resize_ resize_as resize_as_ resize_as_sparse resize_as_sparse_ record_stream segment_reduce to_here
    local_value owner owner_name is_owner confirmed_by_owner wait rename rename_ retain_grad lift
    """.split()
)
_REFUSED_PARTS = ("_backward", "cudnn_", "fbgemm_", "miopen_", "mkldnn", "mps_", "quantize", "shallow_copy", "sparse_")
_OF_TORCHVISION = frozenset({"deform_conv2d", "nms", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool"})
# Arguments by which an operator of a later torch may touch files.
_FILES = frozenset({"filename", "file"})


@cache
def is_computation(namespace: str, name: str) -> bool:
    """Whether an operator, with all its overloads, only computes.

    Args:
        namespace: As in `torch.ops`.
        name: Without overload.
    """
    if namespace == "prim":
        return name in _OF_PRIM
    if namespace == "torchvision":
        return name in _OF_TORCHVISION
    if namespace != "aten" or name in _REFUSED or any(part in name for part in _REFUSED_PARTS):
        return False
    if name.startswith("_") and name not in _INNER:
        return False
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return bool(schemas) and not any(argument.name in _FILES for schema in schemas for argument in schema.arguments)


@cache
def is_refused(name: str) -> bool:
    """Whether an attribute or a method of that name may be an operator of torch's that does more than compute."""
    return bool(torch._C._jit_get_schemas_for_operator(f"aten::{name}")) and not is_computation("aten", name)
