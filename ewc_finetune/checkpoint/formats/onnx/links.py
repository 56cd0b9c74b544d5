"""Which tensor of an ONNX file each weight of the converted model is, and the way back into it.

Weights are found by the node that uses them, not by their values; that the values are the same is checked. A tensor of
the file that several nodes use is one parameter. This module needs the extra `onnx`, and is imported when an ONNX file
is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper
from torch import Tensor, fx, nn

from ewc_finetune.checkpoint.formats.onnx.lowering import Lowered, attribute, safe_name, tensors
from ewc_finetune.errors import ArchitectureError, CheckpointError, first_line

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_OTHER_NORMS = (nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

# The fields of a TensorProto that its numbers may be in.
_DATA = ("float_data", "int32_data", "string_data", "int64_data", "raw_data", "double_data", "uint64_data")


@dataclass(frozen=True)
class Link:
    """A tensor of the model's state that a tensor of the file holds.

    Attributes:
        name: Its name in the model's state.
        source: Its name in the file's graph.
        transposed: Whether the model has it transposed.
        scale: What the model has multiplied it by.
        places: The nodes that use it, by their place in the file's graph, each with the number of its input.
        trained: Whether it is a parameter; else it is a running statistic.
    """

    name: str
    source: str
    transposed: bool
    scale: float
    places: tuple[tuple[int, int], ...]
    trained: bool

    def read(self, tensor: Tensor) -> Tensor:
        """Return what the model has for a tensor of the file."""
        tensor = tensor.T if self.transposed else tensor
        return tensor if self.scale == 1 else tensor * self.scale

    def write(self, tensor: Tensor) -> Tensor:
        """Return what the file has for a tensor of the model."""
        tensor = tensor if self.scale == 1 else tensor / self.scale
        return tensor.T if self.transposed else tensor


@dataclass(frozen=True)
class _Use:
    """One use of a tensor of the file by a module of the model, which has it as an attribute."""

    owner: nn.Module
    attribute: str
    name: str
    source: str
    place: tuple[int, int]
    kind: str  # "weight", "statistic" or "constant"
    transposed: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Links:
    """What is known of a model's tensors.

    Attributes:
        links: One for each that can be written back.
        shared: Tensors of the file that are a parameter in several places, each with the names it would have there.
        constants: Tensors of numbers that nothing shows to be weights, so that they stay as they are.
    """

    links: tuple[Link, ...]
    shared: dict[str, list[str]]
    constants: list[str]


def link(module: fx.GraphModule, lowered: Lowered, label: str) -> Links:
    """Find the file's tensors in the converted model, make parameters of the weights, and tie what is one tensor.

    Raises:
        ArchitectureError: if a weight could not be written back.
        CheckpointError: if a tensor is damaged.
    """
    values = {tensor.name: tensor for tensor in lowered.model.graph.initializer}
    uses: dict[str, list[_Use]] = {}
    for use in _uses(module, lowered):
        uses.setdefault(use.source, []).append(use)
    links: list[Link] = []
    shared: dict[str, list[str]] = {}
    constants: list[str] = []
    for source, users in uses.items():
        value = read_tensor(values[source], label)
        weights = [use for use in users if use.kind == "weight"] if value.is_floating_point() else []
        if weights:
            tied = weights + [use for use in users if use.kind == "constant"]
            links.append(_link(tied, value, label))
            if len(weights) > 1:
                shared[source] = [use.name for use in weights]
        elif value.is_floating_point() and value.numel() > 1 and any(use.kind == "constant" for use in users):
            constants.append(source)
        statistics = [use for use in users if use.kind == "statistic"]
        if statistics:
            links.append(_link(statistics, value, label))
    unlinked = {name for name, _ in module.named_parameters()} - {entry.name for entry in links}
    if unlinked:
        raise ArchitectureError(
            f"{label}: {min(unlinked)} is no tensor of the file, so it could not be written back. Start from the "
            "PyTorch checkpoint that it was exported from"
        )
    return Links(tuple(links), shared, constants)


def read_tensor(tensor: TensorProto, label: str) -> Tensor:
    """Return the numbers of a tensor.

    Raises:
        CheckpointError: if it does not have as many as its shape says, or torch has no such type.
    """
    try:
        return torch.from_numpy(numpy_helper.to_array(tensor).copy())
    except Exception as error:
        raise CheckpointError(f"{label}: its tensor {tensor.name!r} cannot be read ({first_line(error)})") from error


def write_back(model: ModelProto, links: Sequence[Link], state: Mapping[str, Tensor], label: str) -> None:
    """Put a model's state into the tensors of the file's graph; those that have not changed keep their very bytes."""
    holders = tensors(model)
    written: dict[str, Tensor] = {}
    for entry in links:
        holder, value = holders[entry.source], state[entry.name].detach()
        before = written[entry.source] if entry.source in written else read_tensor(holder, label)
        same = torch.equal(entry.read(before), value)
        after = before if same else entry.write(value).to(before.dtype).contiguous()
        if same or entry.source not in written:
            written[entry.source] = after
            if not same:
                _replace(holder, after)
            if after.shape != before.shape:
                _resize(model, before.shape, after.shape)
            continue
        # Exporters store equal tensors once. A weight and a statistic that differ after training need two again.
        names = {tensor.name for tensor in model.graph.initializer}
        name = next(n for n in (f"{entry.source}.{number}" for number in range(len(names) + 1)) if n not in names)
        own = model.graph.initializer.add()
        own.CopyFrom(holder)
        own.name = name
        _replace(own, after)
        for node, slot in entry.places:
            model.graph.node[node].input[slot] = name


def _replace(holder: TensorProto, value: Tensor) -> None:
    for field in _DATA:
        holder.ClearField(field)
    holder.dims[:] = value.shape
    holder.raw_data = numpy_helper.from_array(value.numpy()).raw_data


def _resize(model: ModelProto, before: Sequence[int], after: Sequence[int]) -> None:
    """Let a graph whose head was changed say how many outputs it has."""
    changed = {old: new for old, new in zip(before, after, strict=True) if old != new}
    dims = model.graph.output[0].type.tensor_type.shape.dim
    if dims and dims[-1].dim_value in changed:
        dims[-1].dim_value = changed[dims[-1].dim_value]
    del model.graph.value_info[:]  # shapes of intermediate values, which follow from the graph


def _link(uses: Sequence[_Use], value: Tensor, label: str) -> Link:
    """Tie all uses of one tensor, and check that it is what the converter took it for."""
    first = uses[0]
    if any((use.transposed, use.scale) != (first.transposed, first.scale) for use in uses) or first.scale == 0:
        raise ArchitectureError(
            f"{label}: its tensor {first.source!r} is used in several ways at once ({_names(uses)}), so it could not "
            "be written back. Start from the PyTorch checkpoint that it was exported from"
        )
    trained = first.kind == "weight"
    places = tuple(use.place for use in uses)
    entry = Link(first.name, first.source, first.transposed, first.scale, places, trained)
    if any(not torch.equal(getattr(use.owner, use.attribute), entry.read(value)) for use in uses):
        raise ArchitectureError(
            f"{label}: its tensor {first.source!r} is not what the converter made of it ({_names(uses)}), so it could "
            "not be written back. Start from the PyTorch checkpoint that it was exported from"
        )
    tensor = getattr(first.owner, first.attribute).detach().contiguous()
    one = nn.Parameter(tensor) if trained else tensor
    for use in uses:
        setattr(use.owner, use.attribute, one)
    return entry


def _names(uses: Sequence[_Use]) -> str:
    return ", ".join(use.name for use in uses[:4]) + (" ..." if len(uses) > 4 else "")


def _uses(module: fx.GraphModule, lowered: Lowered) -> list[_Use]:
    """List every use of the file's tensors, in the order of the graph."""
    nodes = {node.name: node for node in lowered.model.graph.node}
    graph = _Neighbours(lowered.model)
    names: dict[str, str] = {}
    uses: list[_Use] = []
    for call in module.graph.nodes:
        if call.op != "call_module":
            continue
        node, part = nodes[call.target], module.get_submodule(call.target)
        place = lowered.places[node.name]
        for owner, name, prefix, slot, transposed, scale in _absorbed(part, node):
            kind = "statistic" if name.startswith("running_") else "weight"
            full = f"{node.name}.{prefix}{name}"
            uses.append(_Use(owner, name, full, node.input[slot], (place, slot), kind, transposed, scale))
        given = [value for value in (*call.args, *call.kwargs.values()) if value is not None]
        mapping: Any = part.onnx_mapping  # `_convert` asks onnx2torch to attach it
        for argument, source in zip(given, filter(None, mapping.inputs), strict=True):
            if argument.op != "get_attr":
                continue
            owner = _rename(module, argument, names.setdefault(source, safe_name(source, set(names.values()))))
            slot = list(node.input).index(source)
            kind = "weight" if graph.shows_weight(node, slot) else "constant"
            name = argument.target.rpartition(".")[2]
            uses.append(_Use(owner, name, argument.target, source, (place, slot), kind))
    module.recompile()
    return uses


def _rename(module: fx.GraphModule, node: fx.Node, name: str) -> nn.Module:
    """Give a constant the name that it has in the file, and return who has it."""
    path, _, number = str(node.target).rpartition(".")
    owner = module.get_submodule(path)
    if name != number:
        value = owner._buffers.pop(number)
        owner.register_buffer(name, value)
        node.target = f"{path}.{name}"
    return owner


def _absorbed(part: nn.Module, node: NodeProto) -> list[tuple[nn.Module, str, str, int, bool, float]]:
    """Return the tensors that a module took from its node's inputs.

    Each is its owner, its name there and what stands before that, the number of the input, whether it was transposed,
    and what it was multiplied by.
    """
    prefix = ""
    if isinstance(part, nn.Sequential):  # onnx2torch makes a padded convolution of two layers
        prefix, part = f"{len(part) - 1}.", part[-1]
    if isinstance(part, nn.Linear):
        alpha, beta = (attribute(node, name, 1.0) for name in ("alpha", "beta"))
        slots = {"weight": (1, not attribute(node, "transB", 0), alpha), "bias": (2, False, beta)}
    elif isinstance(part, _BATCH_NORMS):
        names = ("weight", "bias", "running_mean", "running_var")
        slots = {name: (slot, False, 1.0) for slot, name in enumerate(names, start=1)}
    elif isinstance(part, (*_CONVOLUTIONS, *_OTHER_NORMS)):
        slots = {"weight": (1, False, 1.0), "bias": (2, False, 1.0)}
    else:
        return []
    return [(part, name, prefix, *rest) for name, rest in slots.items() if getattr(part, name) is not None]


class _Neighbours:
    """Who makes each value of a graph, and who uses it."""

    def __init__(self, model: ModelProto) -> None:
        self.constants = {tensor.name for tensor in model.graph.initializer}
        self.makers = {output: node for node in model.graph.node for output in node.output}
        self.users: dict[str, list[tuple[NodeProto, int]]] = {}
        for node in model.graph.node:
            for slot, name in enumerate(node.input):
                self.users.setdefault(name, []).append((node, slot))

    def shows_weight(self, node: NodeProto, slot: int) -> bool:
        """Whether a constant that goes into this input is a weight, as far as the graph shows."""
        if node.op_type == "Transpose":
            following = self.users.get(node.output[0], ())
            return any(self.shows_weight(user, at) for user, at in following if user.op_type != "Transpose")
        if node.op_type == "Add":  # what is added to the product with a weight is its bias
            other = self.makers.get(node.input[1 - slot])
            return other is not None and other.op_type == "MatMul" and self._has_weight(other)
        if node.op_type == "Gather" and slot == 0:  # what the model's input looks up is an embedding
            indices = self.makers.get(node.input[1])
            return indices is None or (indices.op_type == "Cast" and indices.input[0] not in self.makers)
        return slot in _WEIGHTS.get(node.op_type, ())

    def _has_weight(self, product: NodeProto) -> bool:
        makers = (self.makers.get(name) for name in product.input)
        transposed = (node.input[0] for node in makers if node is not None and node.op_type == "Transpose")
        return any(name in self.constants for name in (*product.input, *transposed))


# The inputs of operators, by their numbers, that are weights where they are constant.
_WEIGHTS = {
    "MatMul": (0, 1),
    "PRelu": (1,),
    **dict.fromkeys(("Gemm", "BatchNormalization", "LayerNormalization", "InstanceNormalization"), (1, 2)),
}
