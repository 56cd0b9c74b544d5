"""ONNX files: the graph is converted to be trained, and the weights go back into the file's own graph."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.program import Program, silent
from ewc_finetune.errors import ArchitectureError, CheckpointError, few, first_line
from ewc_finetune.storage.atomic import sha256

if TYPE_CHECKING:  # onnx is an extra; that it is missing is said when a file needs it
    from onnx import ModelProto, TensorProto

    from ewc_finetune.checkpoint.formats.onnx.links import Link, Links
    from ewc_finetune.checkpoint.formats.onnx.lowering import Lowered

_KEY = "ewc_ft"

# Bytes of the largest protobuf message.
_LARGEST = (2 << 30) - 1


class Onnx(Program):
    """An ONNX model."""

    format = "onnx"
    ending = ".onnx"

    what = "an ONNX model"
    untrainable = ": nothing in its graph shows which of its constants are weights"

    def __init__(self, path: Path) -> None:
        model, beside = _read(path)
        # Released when the model is built, so that the weights are not in memory twice.
        self._model: ModelProto | None = model
        self._links: tuple[Link, ...] = ()
        text = next((entry.value for entry in model.metadata_props if entry.key == _KEY), None)
        super().__init__(path, nn.Module(), ModelMetadata.read_text(text, str(path)))
        if beside:
            digests = [str(self.sha256), *(sha256(file) for file in beside)]
            self.sha256 = hashlib.sha256("".join(digests).encode()).hexdigest()
            names = ", ".join(file.name for file in beside)
            self.remarks += (f"{path}: its weights lie in {names}; a file that is written has them inside",)

    def build(self, architecture: str | None) -> tuple[nn.Module, str | None]:
        """See `Checkpoint`.

        Raises:
            ArchitectureError: if it is quantized, has operators that cannot be trained, several inputs or outputs, or
                one size of batch, was exported in training mode, has no weights, or an architecture is named for it.
            NonFiniteError: if a weight is NaN or infinite.
            CheckpointError: if a tensor is damaged.
        """
        from ewc_finetune.checkpoint.formats.onnx.links import link
        from ewc_finetune.checkpoint.formats.onnx.lowering import check_interface, check_operators, lower

        model = self._model or _read(self.path)[0]
        self._model = None
        check_operators(model, self.label)
        check_interface(model, self.label)
        said = _of_graph(model)
        lowered = lower(model)
        module = _convert(lowered, self.label)
        links = link(module, lowered, self.label)
        self.module, self._links = module, links.links
        self.remarks += tuple(f"{self.label}: {remark}" for remark in said + _of_links(links))
        return super().build(architecture)

    def write(self, temporary: Path, path: Path, state: OrderedDict[str, Any], metadata: ModelMetadata) -> None:
        """See `Checkpoint`."""
        from ewc_finetune.checkpoint.formats.onnx.links import write_back

        model, _ = _read(self.path)
        write_back(model, self._links, state, self.label)
        entry = next((entry for entry in model.metadata_props if entry.key == _KEY), None)
        entry = model.metadata_props.add(key=_KEY) if entry is None else entry
        entry.value = metadata.to_text()
        temporary.write_bytes(model.SerializeToString(deterministic=True))


def _read(path: Path) -> tuple[ModelProto, list[Path]]:
    """Return a model with all of its tensors, and the files beside it that some of them come from."""
    try:
        with silent():
            import onnx
            import onnx2torch  # noqa: F401 - it would be missed later
    except ImportError as error:
        raise CheckpointError(
            f"{path} is an ONNX model, which takes packages that are not installed: pip install 'ewc-finetune[onnx]'"
        ) from error
    if path.stat().st_size > _LARGEST:
        raise CheckpointError(f"{path} is larger than any ONNX file can be (2 GB). Its weights belong beside it")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
        files = _fetch(model, path)
        onnx.checker.check_model(str(path))  # given the model itself, it would copy it twice
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a whole ONNX model ({first_line(error)}). Copy it again from where it came, or export it "
            "again"
        ) from error
    return model, files


def _fetch(model: ModelProto, path: Path) -> list[Path]:
    """Put tensors that lie in files beside the model into it."""
    attributes = (attribute for node in model.graph.node for attribute in node.attribute)
    held = [*model.graph.initializer, *(attribute.t for attribute in attributes if attribute.HasField("t"))]
    outside = [tensor for tensor in held if tensor.data_location == tensor.EXTERNAL]
    parts = {tensor.name: _part(tensor, path) for tensor in outside}
    if sum(length for _, _, length in parts.values()) + path.stat().st_size > _LARGEST:
        raise CheckpointError(
            f"{path} and its weights take more than 2 GB, which ewc-ft cannot write as one ONNX file. Start from the "
            "PyTorch checkpoint that it was exported from"
        )
    for tensor in outside:
        file, offset, length = parts[tensor.name]
        with file.open("rb") as stream:
            stream.seek(offset)
            tensor.raw_data = stream.read(length)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    return sorted({file for file, _, _ in parts.values()})


def _part(tensor: TensorProto, path: Path) -> tuple[Path, int, int]:
    """Return where a tensor lies: the file, where in it, and how many bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    windows = PureWindowsPath(location)
    if not location or windows.drive or windows.root or ".." in windows.parts:
        raise CheckpointError(
            f"{path} was made to do harm: its tensor {tensor.name!r} lies at {location!r}, outside of its folder. "
            "Don't use it"
        )
    file = path.parent / PurePosixPath(location)
    if not file.is_file():
        raise CheckpointError(f"{path} has weights in {location}, which is not beside it. Copy all of its files")
    size, offset = file.stat().st_size, int(entries.get("offset", 0))
    length = int(entries.get("length", size - offset))
    if offset < 0 or length < 0 or offset + length > size:
        raise CheckpointError(f"{file} does not hold all of the weights that {path.name} has in it. Copy it again")
    return file, offset, length


def _convert(lowered: Lowered, label: str) -> fx.GraphModule:
    import onnx2torch

    try:
        with silent():
            module: fx.GraphModule = onnx2torch.convert(lowered.model, attach_onnx_mapping=True)
    except Exception as error:
        raise ArchitectureError(
            f"{label} cannot be made a PyTorch model ({type(error).__name__}: {first_line(error)}). Start from the "
            "PyTorch checkpoint that it was exported from"
        ) from error
    inputs = {node.name: node.input for node in lowered.model.graph.node}
    for name, part in list(module.named_children()):
        if name in lowered.substitutes:
            substitute = lowered.substitutes[name]
            substitute.onnx_mapping = part.onnx_mapping
            module.add_module(name, substitute)
        elif isinstance(part, nn.LayerNorm):
            _complete(part, len(inputs[name]) > 2 and bool(inputs[name][2]), f"{label}: {name}")
    return module


def _complete(layer: nn.LayerNorm, bias: bool, where: str) -> None:
    """Give a layer norm the shape that its weight has, and take the bias away that it does not have."""
    if len(layer.normalized_shape) != layer.weight.ndim:
        raise ArchitectureError(
            f"{where} normalises {len(layer.normalized_shape)} dimensions with a weight of {layer.weight.ndim}. Start "
            "from the PyTorch checkpoint that it was exported from"
        )
    layer.normalized_shape = tuple(layer.weight.shape)
    if not bias:
        layer.register_parameter("bias", None)


def _of_graph(model: ModelProto) -> list[str]:
    """Say what an export decided for good."""
    operators = {node.op_type for node in model.graph.node}
    said = ["exported for inference; dropout stays off"]
    if "Conv" in operators and "BatchNormalization" not in operators:
        said.append("normalisation that was folded into convolutions stays there")
    remarks = [f"{' and '.join(said)}, in training too"]
    last = next(node.op_type for node in model.graph.node if model.graph.output[0].name in node.output)
    if last in ("Softmax", "Sigmoid"):
        remarks.append(
            f"it ends in {last}, so its outputs are probabilities where a loss expects logits; export without"
        )
    return remarks


def _of_links(links: Links) -> list[str]:
    """Say what became of constants that several layers have, or none."""
    remarks = []
    if links.shared:
        names = [f"{source} (of {len(uses)} layers)" for source, uses in links.shared.items()]
        remarks.append(f"what is one tensor in the file is trained as one: {few(names)}")
    if links.constants:
        remarks.append(f"constants that nothing shows to be weights stay as they are: {few(links.constants)}")
    return remarks
