"""The anchor: what stands in for the old data, and how it is saved, loaded and validated."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from ewc_finetune.anchor import describe
from ewc_finetune.anchor.half_precision import decode, encode
from ewc_finetune.anchor.hub_weights import ReferringSource, still_elsewhere
from ewc_finetune.anchor.kronecker_tensors import (
    BlockFile,
    check_block,
    check_factor,
    keys_of,
    matrix_of,
    names_of,
    records_of,
    sizes_of,
    to_tensors,
)
from ewc_finetune.anchor.probe_tensors import Probe, ProbeFile, check_probe
from ewc_finetune.anchor.probe_tensors import records_of as records_of_probes
from ewc_finetune.anchor.probe_tensors import to_tensors as probes_to_tensors
from ewc_finetune.anchor.provenance import Provenance, read_provenance
from ewc_finetune.anchor.schema import FORMAT, check_format, groups_of, open_source
from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.errors import AnchorError, NonFiniteError, counted
from ewc_finetune.hub.address import HubAddress, is_address
from ewc_finetune.hub.anchor_files import HubAnchor, fetch_anchor
from ewc_finetune.modules.finite import check_buffer, check_buffers, check_weight, check_weights, is_known_dtype
from ewc_finetune.specs.html import html_table
from ewc_finetune.storage.atomic import atomic_write, sha256
from ewc_finetune.storage.checksums import KEY, CheckedSource
from ewc_finetune.storage.lazy_tensors import TensorFile, shapes_of, write_tensors
from ewc_finetune.storage.safetensors_source import TensorSource


@dataclass(frozen=True)
class Anchor:
    """Weights to stay near, and how much each one matters.

    Attributes:
        weights: Every parameter of the model, by name.
        fisher: Diagonal Fisher of the parameters that the penalty holds one by one, float32, same shapes.
        buffers: Persistent buffers: normalisation statistics and the like.
        provenance: Where all this comes from.
        path: The file it was loaded from or saved to; in several, their index.
        digest: SHA-256 of that file, or of the one that several would make.
        place: Where it is on the Hub, at a commit, if it was loaded from there.
        remarks: What a reader should know of the file: keys of a later tool that were ignored.
        blocks: Kronecker-factored blocks of the layers that it holds as wholes, by the layer's name.
        probes: Inputs of the domain as they are, with the model's answers to them; none unless they were asked for.
    """

    weights: Mapping[str, Tensor]
    fisher: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    provenance: Provenance
    path: Path | None = None
    digest: str | None = None
    place: HubAddress | None = None
    remarks: tuple[str, ...] = ()
    blocks: Mapping[str, Block] = field(default_factory=dict)
    probes: Sequence[Probe] = ()

    def __repr__(self) -> str:
        held, numbers = self._numbers
        blocks = f", {len(self.blocks)} K-FAC blocks" if self.blocks else ""
        probes = f", {counted(len(self.probes), 'probe')}" if self.probes else ""
        place = self.place or self.path
        return (
            f"<Anchor {self.provenance.name!r}: {self.provenance.curvature}, {self.provenance.samples:,} samples, "
            f"holds {held:,} of {numbers:,} weights in {counted(len(self.weights), 'tensor')}{blocks}{probes}"
            f"{'' if place is None else f', {place}'}>"
        )

    @property
    def _numbers(self) -> tuple[int, int]:
        """How many weights it holds, and how many there are."""
        held, every = self.held_shapes(), shapes_of(self.weights)
        return sum(shape.numel() for shape in held.values()), sum(shape.numel() for shape in every.values())

    def _repr_html_(self) -> str:
        origin = self.provenance
        held, numbers = self._numbers
        facts = [
            ("data", describe.data(origin.data, origin.samples)),
            ("curvature", describe.joined(describe.curvature(vars(origin)), describe.estimate(vars(origin)))),
            ("likelihood", origin.likelihood),
            ("holds", f"{held:,} of {numbers:,} weights"),
            ("probes", counted(len(self.probes), "probe") if self.probes else ""),
            ("scores", describe.scores(origin.scores)),
            ("file", str(self.place or self.path or "")),
        ]
        return html_table((), [fact for fact in facts if fact[1]], f"anchor {origin.name}")

    @property
    def label(self) -> str:
        """The name for messages: the file or address if there is one."""
        return str(self.place or self.path or f"anchor {self.provenance.name!r}")

    @property
    def metadata(self) -> dict[str, str]:
        """The texts that its file has."""
        return {
            "format": FORMAT,
            "format_version": str(self.provenance.format_version),
            "anchor": json.dumps(self.provenance.to_json(), sort_keys=True),
        }

    def held_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the parameters that the penalty holds, singly or in a block; no tensor is read."""
        weights = shapes_of(self.weights)
        in_blocks = {name: weights[name] for names in names_of(self.blocks).values() for name in names}
        return shapes_of(self.fisher) | in_blocks

    def without(self, names: Collection[str]) -> Anchor:
        """Return the anchor with these parameters left free, and with them the whole of a block that they are in."""
        fisher: Mapping[str, Tensor]
        if isinstance(self.fisher, TensorFile):
            fisher = self.fisher.without(names)
        else:
            fisher = {name: value for name, value in self.fisher.items() if name not in names}
        blocks: Mapping[str, Block]
        gone = [layer for layer, own in names_of(self.blocks).items() if set(own) & set(names)]
        if isinstance(self.blocks, BlockFile):
            blocks = self.blocks.without(gone)
        else:
            blocks = {layer: block for layer, block in self.blocks.items() if layer not in gone}
        return replace(self, fisher=fisher, blocks=blocks)

    def without_probes(self) -> Anchor:
        """Return the anchor without any sample of the data, to be shared with those who may not have them."""
        return replace(self, probes=(), provenance=replace(self.provenance, probes=[]))

    def save(self, path: str | Path, *, overwrite: bool = True) -> Anchor:
        """Write the anchor as one safetensors file and return it with `path` and `digest` set.

        The same anchor gives the same bytes. The file is put into place when it is whole.

        Args:
            path: Of the file.
            overwrite: Whether a file that is there may be replaced.

        Raises:
            AnchorError: if a tensor is missing, of the wrong shape or negative, or every Fisher is zero.
            NonFiniteError: if a tensor holds NaN or infinity.
            StorageError: if the file cannot be written.
        """
        validate(self)
        with atomic_write(Path(path), overwrite=overwrite) as temporary:
            return self.write(temporary, Path(path))

    def write(self, temporary: Path, path: Path) -> Anchor:
        """Write a valid anchor into a temporary file, which is to be renamed to `path`; see `save`."""
        record = self.provenance.weights_reference
        if record is not None and not isinstance(self.weights, TensorFile):  # which may have changed since
            record = still_elsewhere(record, self.label, self.weights)
        elsewhere = () if record is None else record["tensors"]
        tensors = _stored_fisher(self.fisher, self.provenance)
        tensors |= {f"anchor.{name}": self.weights[name] for name in self.weights if name not in elsewhere}
        tensors |= {f"buffer.{name}": value for name, value in self.buffers.items()}
        tensors |= {f"kfac.{name}": value for name, value in to_tensors(self.blocks).items()}
        tensors |= {f"probe.{name}": value for name, value in probes_to_tensors(self.probes).items()}
        provenance = replace(
            self.provenance,
            kfac=list(records_of(self.blocks).values()),
            probes=records_of_probes(self.probes),
            weights_reference=record,
        )
        metadata = replace(self, provenance=provenance).metadata
        write_tensors(temporary, path, tensors, metadata)
        return replace(self, provenance=provenance, path=path, digest=sha256(temporary))

    @classmethod
    def load(cls, path: str | Path | HubAddress) -> Anchor:
        """Read and validate an anchor file whole; nothing in it is ever executed.

        Raises:
            AnchorError: if the file is missing, is no anchor, is of a newer format, or contradicts itself.
            NonFiniteError: if a tensor holds NaN or infinity.
        """
        anchor = cls.open(path)
        whole = replace(
            anchor,
            weights=dict(anchor.weights),
            fisher=dict(anchor.fisher),
            buffers=dict(anchor.buffers),
            blocks=dict(anchor.blocks),
            probes=tuple(anchor.probes),
        )
        _check_not_zero(whole)
        return whole

    @classmethod
    def open(cls, path: str | Path | HubAddress, *, digest: bool = True) -> Anchor:
        """Open an anchor file without reading its tensors: each is read, and checked, when it is asked for.

        That is how a thousand anchors are stacked in the memory of one. The file must stay as it is meanwhile.

        Args:
            path: The file, the index of several, or an address on the Hub, `hf://ORG/NAME[@REVISION][/FILE]`.
            digest: Whether to compute its digest, for which all of it is read once.

        Raises:
            AnchorError: if the file is missing, is no anchor, is of a newer format, or its tensors don't belong
                together; later, for a tensor that cannot be used.
            HubError: if it cannot be had from the Hub, or is not what was promised there.
            NonFiniteError: later, for a tensor with NaN or infinity.
        """
        if isinstance(path, HubAddress) or is_address(path):
            return cls.of_hub(fetch_anchor(str(path)))
        path = Path(path)
        source = open_source(path)
        return replace(cls.of(source, path), digest=source.digest() if digest else None)

    @classmethod
    def of_hub(cls, fetched: HubAnchor) -> Anchor:
        """Return an anchor that was fetched from the Hub, without reading its tensors; see `open`."""
        anchor = cls.of(fetched.source, fetched.path, fetched.place)
        return replace(anchor, digest=fetched.digest, remarks=fetched.remarks + anchor.remarks)

    @classmethod
    def of(cls, source: TensorSource, path: Path | None = None, place: HubAddress | None = None) -> Anchor:
        """Return the anchor of which a source has the tensors, without reading them; see `open`."""
        where = source.label
        check_format(source.metadata, where)
        provenance, unknown = read_provenance(source.metadata.get("anchor"), where)
        unknown += sorted(source.metadata.keys() - {"format", "format_version", "anchor", KEY})
        source = CheckedSource(source)
        if provenance.weights_reference is not None:
            source = ReferringSource(source, provenance.weights_reference)
        groups = groups_of(provenance)
        unknown += [key for key in sorted(source.entries) if not key.startswith(groups) or key.endswith(".")]
        factors = TensorFile(source, "kfac.", _checked(check_factor, where))
        records = {record["layer"]: record for record in provenance.kfac}
        probed = TensorFile(source, "probe.", lambda n, t: t)  # which are checked together
        anchor = cls(
            weights=TensorFile(source, "anchor.", _checked(check_weight, f"{where}: anchor.")),
            fisher=TensorFile(source, "fisher.", _fisher_reader(source, provenance)),
            buffers=TensorFile(source, "buffer.", _checked(check_buffer, f"{where}: buffer.")),
            provenance=provenance,
            path=path,
            place=place,
            remarks=(f"{where}: ignored what this version does not know: {', '.join(unknown)}",) if unknown else (),
            blocks=BlockFile(factors, records, where),
            probes=ProbeFile(probed, provenance.probes, where),
        )
        unclaimed = [key for key in factors if key not in keys_of(factors, records)]
        if unclaimed:
            raise AnchorError(f"{where}: kfac.{unclaimed[0]} belongs to no layer that it names. Make the anchor again")
        _check_shapes(anchor)
        return anchor


def _checked(check: Callable[[str, Tensor, str], None], where: str) -> Callable[[str, Tensor], Tensor]:
    """Return what gives a tensor back once it is checked."""

    def use(name: str, tensor: Tensor) -> Tensor:
        check(name, tensor, where)
        return tensor

    return use


def _stored_fisher(fisher: Mapping[str, Tensor], provenance: Provenance) -> dict[str, Tensor]:
    """Return the tensors that a file has of a diagonal."""
    if provenance.curvature_storage is None:
        return {f"fisher.{name}": value.float() for name, value in fisher.items()}
    tensors: dict[str, Tensor] = {}
    for name, value in fisher.items():
        stored, scale = encode(value.float(), provenance.curvature_storage["dtype"])
        tensors |= {f"fisher.{name}": stored, f"scale.{name}": scale}
    return tensors


def _fisher_reader(source: TensorSource, provenance: Provenance) -> Callable[[str, Tensor], Tensor]:
    """Return what makes a tensor of the diagonal of what the file has of it."""
    if provenance.curvature_storage is None:
        return _checked(check_fisher, source.label)

    def use(name: str, stored: Tensor) -> Tensor:
        key = f"scale.{name}"
        scale = source.read(key) if key in source.entries else torch.tensor(math.nan)
        if scale.shape or not scale.is_floating_point() or not scale.isfinite() or scale <= 0:
            raise AnchorError(f"{source.label}: {key} should be one number above 0. Make the anchor again")
        fisher = decode(stored, scale) if stored.is_floating_point() else stored
        check_fisher(name, fisher, source.label)
        return fisher

    return use


def validate(anchor: Anchor) -> None:
    """Check that an anchor can be used: complete, finite, and with a Fisher that is not zero everywhere.

    Raises:
        AnchorError: naming the tensor, what was expected and what was found.
        NonFiniteError: naming the tensor.
    """
    _check_shapes(anchor)
    for name, fisher in anchor.fisher.items():
        check_fisher(name, fisher, anchor.label)
    for block in anchor.blocks.values():
        check_block(block, anchor.label)
    for number, probe in enumerate(anchor.probes):
        check_probe(probe, f"{anchor.label}: probe.{number}")
    check_weights(anchor.weights, f"{anchor.label}: anchor.")
    check_buffers(anchor.buffers, f"{anchor.label}: buffer.")
    _check_not_zero(anchor)


def _check_shapes(anchor: Anchor) -> None:
    weights = shapes_of(anchor.weights)
    for name, shape in shapes_of(anchor.fisher).items():
        if name not in weights:
            raise AnchorError(f"{anchor.label}: fisher.{name} has no anchor.{name} beside it. Make the anchor again")
        if weights[name] != shape:
            raise AnchorError(
                f"{anchor.label}: fisher.{name} has shape {tuple(shape)} and anchor.{name} has shape "
                f"{tuple(weights[name])}. Make the anchor again"
            )

    for layer, names in names_of(anchor.blocks).items():
        outputs = matrix_of(anchor.blocks, layer, weights[names[0]])["output"] if names[0] in weights else None
        if len(names) > 1 and (names[1] == names[0] or weights.get(names[1], (outputs,)) != (outputs,)):
            raise AnchorError(
                f"{anchor.label}: kfac.{layer} is of {names[0]} with {names[1]}, which is no bias of its outputs. Make "
                "the anchor again"
            )
        for name in names:
            if name not in weights or name in anchor.fisher:
                wrong = "also has a diagonal" if name in weights else f"has no anchor.{name} beside it"
                raise AnchorError(f"{anchor.label}: kfac.{layer} is of {name}, which {wrong}. Make the anchor again")
        expected = matrix_of(anchor.blocks, layer, weights[names[0]])
        sizes = sizes_of(anchor.blocks, layer)
        if sizes != expected:
            raise AnchorError(
                f"{anchor.label}: the factors of {layer} have {sizes['input']} and {sizes['output']} rows; with "
                f"weights of shape {tuple(weights[names[0]])} they should have {expected['input']} and "
                f"{expected['output']}. Make the anchor again"
            )


def _check_not_zero(anchor: Anchor) -> None:
    if not any(fisher.any() for fisher in anchor.fisher.values()) and not any(
        block.trace for block in anchor.blocks.values()
    ):
        refuse_zero(anchor)


def refuse_zero(anchor: Anchor) -> NoReturn:
    """Raise the AnchorError of an anchor that would hold nothing."""
    raise AnchorError(
        f"{anchor.label}: the Fisher is zero everywhere, so the anchor would hold nothing. Either every parameter "
        "was excluded, or the model's outputs do not depend on its weights (saturated, or all units dead)"
    )


def check_fisher(name: str, fisher: Tensor, where: str) -> None:
    """Refuse a Fisher that is not finite, or negative somewhere; `where` is what it belongs to.

    Raises:
        AnchorError: naming the tensor.
        NonFiniteError: naming the tensor.
    """
    if not fisher.is_floating_point() or not is_known_dtype(fisher.dtype):
        raise AnchorError(f"{where}: fisher.{name} has type {fisher.dtype}; expected float32")
    if not fisher.isfinite().all():
        raise NonFiniteError(f"{where}: fisher.{name} holds NaN or infinity. Make the anchor again")
    if (fisher < 0).any():
        raise AnchorError(f"{where}: fisher.{name} holds negative values; a Fisher is a mean of squares")
