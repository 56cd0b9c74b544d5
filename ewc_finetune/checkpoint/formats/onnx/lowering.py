"""ONNX graphs in the words that the converter to PyTorch knows: older operators, weights in one place, safe names.

What is changed is the converter's. The file's own graph is read again, and gets its weights back.
This module needs the extra `onnx`, and is imported when an ONNX file is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from onnx import ModelProto, NodeProto, TensorProto, defs, helper, numpy_helper
from onnx2torch.node_converters import get_converter
from torch import Tensor, fx, nn

from ewc_finetune.errors import ArchitectureError

# The newest set of operators that the converter knows all operators of.
OPSET = 17

# Operators that newer sets only gave more element types, each with the newest version that did no more.
_MORE_TYPES = {
    **dict.fromkeys(
        ("Conv", "ConvTranspose", "Cos", "Dropout", "Elu", "Equal", "GlobalAveragePool", "HardSigmoid", "HardSwish"), 22
    ),
    **dict.fromkeys(("InstanceNormalization", "MaxPool", "Round", "Selu", "Sin", "Softplus", "Softsign"), 22),
    **dict.fromkeys(("Cast", "Constant", "ConstantOfShape", "Flatten", "Identity", "Reshape", "Shape"), 25),
    **dict.fromkeys(("Squeeze", "Transpose", "Unsqueeze"), 25),
}

_QUANTIZED = re.compile(r"Quantize|^QLinear|^Q[A-Z]|Integer$|NBits$")

_BACK = "Start from the PyTorch checkpoint that it was exported from"


@dataclass(frozen=True)
class Lowered:
    """A graph for the converter.

    Attributes:
        model: The graph.
        places: Where each of its nodes stands in the file's graph, by the node's name.
        substitutes: Modules to put in the places of what the converter makes of these nodes.
    """

    model: ModelProto
    places: dict[str, int]
    substitutes: dict[str, nn.Module]


def tensors(model: ModelProto) -> dict[str, TensorProto]:
    """Return the constant tensors of a graph by their names there: initializers and what Constant nodes hold."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and attribute(node, "value") is not None:
            constants[node.output[0]] = next(a for a in node.attribute if a.name == "value").t
    return constants


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """Return a node's attribute of this name."""
    entry = next((a for a in node.attribute if a.name == name), None)
    return default if entry is None else helper.get_attribute_value(entry)


def check_interface(model: ModelProto, label: str) -> None:
    """Refuse several inputs or outputs, and one size of batch.

    Raises:
        ArchitectureError: saying how to export it instead.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    for what, values in (("input", inputs), ("output", list(model.graph.output))):
        if len(values) != 1:
            names = ", ".join(value.name for value in values) or "none"
            raise ArchitectureError(f"{label} has {len(values)} {what}s ({names}); ewc-ft trains models of one {what}")
    dims = inputs[0].type.tensor_type.shape.dim
    if dims and dims[0].HasField("dim_value"):
        name = inputs[0].name
        raise ArchitectureError(
            f"{label} was exported for batches of exactly {dims[0].dim_value}. Export it again with a dynamic first "
            f'dimension: torch.onnx.export(..., input_names=["{name}"], dynamic_axes={{"{name}": {{0: "batch"}}}}), or '
            "with dynamo=True dynamic_shapes=({0: torch.export.Dim('batch')},)"
        )


def check_operators(model: ModelProto, label: str) -> None:
    """Refuse operators that cannot be trained, all of them by name.

    Raises:
        ArchitectureError: naming them, and the way back to a model that can be trained.
    """
    operators = {_name(node): node for node in model.graph.node}
    quantized = sorted(name for name, node in operators.items() if _QUANTIZED.search(node.op_type))
    if quantized:
        raise ArchitectureError(
            f"{label} is quantized ({', '.join(quantized)}), and rounded weights cannot be trained. Use the model from "
            "before it was quantized"
        )
    for node in model.graph.node:
        training = attribute(node, "training_mode", 0) if node.op_type == "BatchNormalization" else 0
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
            constant = tensors(model).get(node.input[2])
            training = constant is None or any(_numbers(constant))
        if training:
            raise ArchitectureError(
                f"{label} was exported in training mode: {node.name or node.op_type} acts at every call. Export "
                "model.eval() instead"
            )
    constants = tensors(model)
    opset = _opset(model)
    lacking = {_name(node): node for node in model.graph.node if not _known(node, opset, constants)}
    if lacking:
        newer = opset > OPSET and all(_since(node, opset) > OPSET for node in lacking.values())
        again = f", or export it again with dynamo=False, opset_version={OPSET}" if newer else ""
        raise ArchitectureError(
            f"{label} has operators that cannot be trained here: {', '.join(sorted(lacking))} (opset {opset}). "
            f"{_BACK}{again}"
        )


def lower(model: ModelProto) -> Lowered:
    """Change a checked graph into one that the converter can take."""
    graph, constants, opset = model.graph, tensors(model), _opset(model)
    outputs = {value.name for value in graph.output}
    known = {tensor.name for tensor in graph.initializer}
    aliases: dict[str, str] = {}
    taken = {"initializers", *known, *(value.name for value in graph.input)}
    kept, places, substitutes = [], {}, {}
    for place, node in enumerate(graph.node):
        for slot, name in enumerate(node.input):
            node.input[slot] = aliases.get(name, name)
        # `link` looks for weights among the initializers, under one name each.
        if node.op_type == "Constant" and node.output[0] in constants and constants[node.output[0]].dims:
            graph.initializer.add().CopyFrom(constants[node.output[0]])
            graph.initializer[-1].name = node.output[0]
            known.add(node.output[0])
            continue
        if node.op_type == "Identity" and node.input[0] in known and node.output[0] not in outputs:
            aliases[node.output[0]] = node.input[0]
            continue
        node.domain = ""
        node.name = safe_name(_called(node, known) or node.op_type, taken)
        taken.add(node.name)
        places[node.name] = place
        substitute = _substitute(node)
        if substitute is not None:
            substitutes[node.name] = substitute
        if node.op_type == "Dropout" or (substitute is not None and node.op_type != "Split"):
            # An Identity, in whose place the substitute is put; a Dropout stays one.
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
        _lower_node(node, opset, constants)
        kept.append(node)
    held = [NodeProto.FromString(node.SerializeToString()) for node in kept]
    del graph.node[:], model.opset_import[:], model.functions[:]
    graph.node.extend(held)
    model.opset_import.add(domain="", version=min(opset, OPSET))
    return Lowered(model, places, substitutes)


def _name(node: NodeProto) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def _called(node: NodeProto, constants: Set[str]) -> str:
    """Return a node's name, or rather what its weight is called where that has the name of a module."""
    weight = node.input[1] if len(node.input) > 1 else ""
    return weight.removesuffix(".weight") if weight in constants and weight.endswith(".weight") else node.name


def _opset(model: ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def _since(node: NodeProto, opset: int) -> int:
    """Return the version of an operator that a set of operators has."""
    try:
        return defs.get_schema(node.op_type, opset, "").since_version
    except defs.SchemaError:
        return 0


def _known(node: NodeProto, opset: int, constants: Mapping[str, TensorProto]) -> bool:
    if node.domain not in ("", "ai.onnx") or not _says_no_more(node, opset, constants):
        return False
    if node.op_type in _SUBSTITUTES:
        return True
    try:
        get_converter(node.op_type, min(opset, OPSET))
    except NotImplementedError:
        return False
    return True


def _says_no_more(node: NodeProto, opset: int, constants: Mapping[str, TensorProto]) -> bool:
    """Whether the converter's version of an operator can say what the node does."""
    since = _since(node, opset)
    if node.op_type == "Dropout" and len(node.output) > 1:
        return False
    if node.op_type == "Reshape" and attribute(node, "allowzero", 0):
        # `allowzero` matters only where the shape has a zero.
        shape = constants.get(node.input[1])
        return shape is not None and 0 not in _numbers(shape) and since <= _MORE_TYPES["Reshape"]
    if since <= OPSET or since <= _MORE_TYPES.get(node.op_type, 0) or node.op_type in _SUBSTITUTES:
        return True
    latest, check = _OLDER.get(node.op_type, (0, None))
    return since <= latest and check is not None and check(node, constants)


class _ToHalf(nn.Module):
    """A cast to half precision, or to what the weights are in while they are trained in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.like: Tensor
        self.register_buffer("like", torch.zeros((), dtype=torch.float16))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.like.dtype)


class _Chunks(nn.Module):
    """A split into so many parts, of which the last may be smaller."""

    def __init__(self, count: int, axis: int) -> None:
        super().__init__()
        self.count = count
        self.axis = axis

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        size = -(-inputs.shape[self.axis] // self.count)
        return torch.split(inputs, size, self.axis)


# Operators that the converter lacks, and torch has.
_SUBSTITUTES: dict[str, Callable[[NodeProto], nn.Module]] = {
    "Gelu": lambda node: nn.GELU(attribute(node, "approximate", b"none").decode()),
    "Mish": lambda _: nn.Mish(),
}


def _substitute(node: NodeProto) -> nn.Module | None:
    if node.op_type == "Cast" and attribute(node, "to") == TensorProto.FLOAT16:
        return _ToHalf()
    count = attribute(node, "num_outputs") if node.op_type == "Split" else None
    if count is not None:
        return _Chunks(count, attribute(node, "axis", 0))
    return _SUBSTITUTES[node.op_type](node) if node.op_type in _SUBSTITUTES else None


def _constant_axes(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    if len(node.input) < 2 or not node.input[1]:
        return not attribute(node, "noop_with_empty_axes", 0)
    return node.input[1] in constants and bool(_numbers(constants[node.input[1]]))


def _plain_pad(node: NodeProto, _: Mapping[str, TensorProto]) -> bool:
    return len(node.input) < 4 and attribute(node, "mode", b"constant") != b"wrap"


def _plain_pool(node: NodeProto, _: Mapping[str, TensorProto]) -> bool:
    return not attribute(node, "ceil_mode", 0) and set(attribute(node, "dilations", [])) <= {1}


def _plain_resize(node: NodeProto, _: Mapping[str, TensorProto]) -> bool:
    policy = attribute(node, "keep_aspect_ratio_policy", b"stretch")
    return not attribute(node, "antialias", 0) and not attribute(node, "axes") and policy == b"stretch"


# Operators whose newer versions can do more: the newest version, and whether a node does only what older ones could.
_OLDER: dict[str, tuple[int, Callable[[NodeProto, Mapping[str, TensorProto]], bool]]] = {
    **{
        f"Reduce{kind}": (20, _constant_axes)
        for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    },
    "AveragePool": (22, _plain_pool),
    "Pad": (25, _plain_pad),
    "Resize": (19, _plain_resize),
    "ScatterND": (18, lambda node, _: attribute(node, "reduction", b"none") not in (b"max", b"min")),
    "Split": (18, lambda *_: True),
}


def _lower_node(node: NodeProto, opset: int, constants: Mapping[str, TensorProto]) -> None:
    """Write a node as the older set of operators has it."""
    drop = {"allowzero"} if node.op_type == "Reshape" else set()
    if _since(node, opset) > OPSET:
        drop |= {"antialias", "keep_aspect_ratio_policy", "noop_with_empty_axes", "num_outputs", "saturate"}
        if node.op_type in _OLDER and node.op_type != "Resize":
            drop.add("dilations")
        if node.op_type in _OLDER and node.op_type.startswith("Reduce") and len(node.input) > 1:
            axes = _numbers(constants[node.input[1]]) if node.input[1] else None
            del node.input[1:]
            if axes is not None:
                node.attribute.append(helper.make_attribute("axes", axes))
    attributes = [a for a in node.attribute if a.name not in drop]
    del node.attribute[:]
    node.attribute.extend(attributes)


def _numbers(tensor: TensorProto) -> list[Any]:
    numbers: list[Any] = numpy_helper.to_array(tensor).flatten().tolist()
    return numbers


def safe_name(name: str, taken: Set[str]) -> str:
    """Return a name that is no other's, and can stand in the code that torch.fx makes of a graph."""
    name = re.sub(r"[^\w/:-]", "_", name.replace(".", "/"), flags=re.ASCII).strip("/") or "node"
    if name.startswith("_") or name.startswith("onnx_initializer_"):
        name = f"node{name}"
    free, number = name, 1
    while free in taken or free == "training" or hasattr(fx.GraphModule, free):
        free, number = f"{name}_{number}", number + 1
    return free
