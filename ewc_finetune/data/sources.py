"""Kinds of data by name, and how a data spec becomes a domain."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ewc_finetune.choices import Split
from ewc_finetune.data.arrays import Arrays
from ewc_finetune.data.domain import Domain, as_domain
from ewc_finetune.data.draw import are_classes, describe_draw, draw_evenly
from ewc_finetune.data.hugging_face import ImageColumn, is_rows, load_hugging_face, of_rows
from ewc_finetune.data.images import ImageFiles, load_image_folder, load_images
from ewc_finetune.data.npz import load_npz
from ewc_finetune.data.options import COMMON, DataOptions, read_options
from ewc_finetune.data.relabelling import relabelled
from ewc_finetune.data.table import Table
from ewc_finetune.data.table_files import ENDINGS as TABLES
from ewc_finetune.data.tables import load_table
from ewc_finetune.data.texts import Generated, Texts, TextStream, load_generated, load_text
from ewc_finetune.data.transform import Transform
from ewc_finetune.errors import DataError, UsageError, first_line, suggest
from ewc_finetune.specs.importing import find, value_of, working_directory_on_path
from ewc_finetune.specs.query import Address, parse

ENVIRONMENT = "EWC_FT_DATA"


def load_domain(spec: str, default_split: Split, data_dir: str | Path | None = None) -> Domain:
    """Load the data that a spec names.

    Args:
        spec: A data spec such as `mnist`, `digits?rotate=90`, `imagefolder:photos/?size=64&limit=1000`.
        default_split: The split, where the spec doesn't say.
        data_dir: Where downloads lie or go; else the environment's EWC_FT_DATA, else `~/.cache/ewc-finetune/data`.

    Raises:
        UsageError: if the spec is not understood.
        DataError: if the data is not there, or nothing is left of it.
    """
    address = parse(spec)
    kind, colon, place = address.head.partition(":")
    if kind in _PLACES:
        load, own = _PLACES[kind]
        options = read_options(address, own)
        return _select(load(address, place, options.split or default_split, options), options)
    if names_code(spec) is not None:
        return _call(address, kind, place, default_split)
    options = read_options(address)
    if kind not in _IN_MEMORY or colon:
        forms = [f"{name}:{'N' if name == 'generate' else 'PATH'}" for name in _PLACES]
        if Path(spec).is_file():
            ending = Path(spec).suffix.removeprefix(".")
            near = {"npz": "npz", "txt": "text", "jsonl": "hf", "json": "hf"}.get(ending)
            near = "table" if f".{ending}" in TABLES else near or "text"
            raise UsageError(f"{spec} is a file; say of what kind it is: {near}:{spec}")
        if Path(spec).is_dir():
            raise UsageError(
                f"{spec} is a folder; say of what kind it is: images:{spec} has images without labels, "
                f"imagefolder:{spec} a folder of them for each class, and hf:{spec} a dataset"
            )
        raise UsageError(f"{spec}: no data is called {kind!r}. {suggest(kind, [*_IN_MEMORY, *forms, _FUNCTION])}")
    split: Split = options.split or default_split
    folder = Path(data_dir or os.environ.get(ENVIRONMENT) or Path.home() / ".cache" / "ewc-finetune" / "data")
    images, labels, classes = _IN_MEMORY[kind](split, folder)
    domain = Domain(str(address), TensorDataset(images, labels), classes, labels, split, unit=True)
    return _select(domain, options)


def names_code(spec: str) -> str | None:
    """Return the `module:function` that a data spec would import, if it is one."""
    head = parse(spec).head
    kind, _, place = head.partition(":")
    if kind in _PLACES or kind in _IN_MEMORY:
        return None
    return head if all(part.isidentifier() for part in [*kind.split("."), place]) else None


def resolve_domain(
    data: object, default_split: Split, data_dir: str | Path | None = None, *, weighted: bool = False
) -> Domain:
    """Make a domain of a data spec (`load_domain`), or of a dataset or loader (`as_domain`, `of_rows`).

    Raises:
        UsageError: if it has a weight, and is not `weighted`.
    """
    if isinstance(data, str):
        domain = load_domain(data, default_split, data_dir)
    else:
        domain = of_rows(data, "data", DataOptions()) if is_rows(data) else as_domain(data)
    if domain.weight is not None and not weighted:
        raise UsageError(f"{domain.name}: weight= is for --data of finetune, sweep and consolidate; leave it out")
    return domain


def resolve_domains(
    data: Any, default_split: Split, data_dir: str | Path | None = None, *, weighted: bool = False
) -> list[Domain]:
    """Make domains of one piece of data, or of several (`items_of`). Datasets without a name are numbered.

    Raises:
        UsageError: see `resolve_domain`.
    """
    items = items_of(data)
    if not items and weighted:
        raise UsageError("there is no data: the list of it is empty")
    specs = [item for item in items if isinstance(item, str)]
    twice = next((spec for spec in specs if specs.count(spec) > 1), None)
    if weighted and twice is not None:
        raise UsageError(f"the data {twice} is given twice; weight=2 behind its question mark takes each sample twice")
    domains = [resolve_domain(item, default_split, data_dir, weighted=weighted) for item in items]
    if isinstance(data, Mapping):
        return [replace(domain, name=name) for name, domain in zip(data, domains, strict=True)]
    if len(items) == 1 and items[0] is data:
        return domains
    numbered = enumerate(zip(items, domains, strict=True), start=1)
    # A domain has its name from before, by which it is known.
    return [
        replace(domain, name=f"data {number}") if domain.name == "data" and item is not domain else domain
        for number, (item, domain) in numbered
    ]


def items_of(data: Any) -> list[Any]:
    """Return one piece of data, or those of a list of specs or datasets, or of a dict of such by name.

    A list of anything else is a list of batches: one piece.
    """
    if isinstance(data, Mapping):
        return list(data.values())
    return list(data) if isinstance(data, (list, tuple)) and all(map(_is_domain, data)) else [data]


def _is_domain(item: object) -> bool:
    return isinstance(item, (str, Domain, Dataset, DataLoader)) or is_rows(item)


def _call(address: Address, module: str, name: str, default_split: Split) -> Domain:
    """Call a function of the user's for a dataset; options that it names, or that are none of ours, go to it."""
    with working_directory_on_path(first=True):
        function = find(f"{module}:{name}", "data", DataError)
    if not callable(function):
        raise DataError(f"{address}: {name} is a {type(function).__name__}; expected a function that returns a dataset")
    try:
        parameters = set(inspect.signature(function).parameters)
    except ValueError:  # some functions that are written in C have no signature
        parameters = set()
    takes_split = "split" in parameters
    ours = set(COMMON) - (parameters - {"split"})
    arguments = {key: value_of(text) for key, text in address.options.items() if key not in ours}
    options = read_options(Address(address.head, {k: v for k, v in address.options.items() if k in ours}))
    split: Split = options.split or default_split
    if options.split and not takes_split:
        raise UsageError(f"{address}: {name} takes no argument split, so it has no splits to choose from")
    try:
        dataset = function(**arguments, **({"split": split} if takes_split else {}))
    except Exception as error:
        raise DataError(f"{address}: {name} failed with {type(error).__name__}: {error}") from error
    domain = replace(as_domain(dataset, str(address)), name=str(address), split=split if takes_split else None)
    return _select(domain, options)


def _select(domain: Domain, options: DataOptions) -> Domain:
    _check_options(domain, options)
    domain = replace(domain, transform=_said(domain, options), augment=options.augment, weight=options.weight)
    if options.active is not None:
        domain = replace(domain, active=tuple(sorted({output for part in options.active for output in part})))
    if not domain.indexable:
        return _first_of_stream(domain, options)
    size = domain.size or 0
    kept = options.keep(size, domain.labels)
    if not len(kept) and domain.labels is not None:
        present = ", ".join(map(str, sorted(set(domain.labels.tolist()))))
        raise DataError(f"{domain.name}: nothing is left; its labels are {present or 'none: there are no samples'}")
    if len(kept) < size:
        domain = domain.subset(kept.tolist())
    if options.limit is not None and options.limit < len(kept):
        domain = _drawn(domain, options.limit)
    if options.offset and domain.labels is not None:
        domain = _offset(domain, options.offset)
    if not isinstance(domain.samples, TensorDataset) or isinstance(domain.samples, Table):
        return domain
    images, *labels = domain.samples.tensors
    if options.changes_images:
        images = torch.cat([options.apply(part) for part in torch.split(images, 4096)])
    return replace(domain, samples=TensorDataset(images, *labels))


def _offset(domain: Domain, offset: int) -> Domain:
    """Return a domain with other numbers of its classes.

    Raises:
        DataError: if there are negative ones among them.
    """
    labels = cast("Tensor", domain.labels)
    moved = labels + offset
    if moved.numel() and not are_classes(labels):
        raise DataError(f"{domain.name}: offset= is of numbers of classes, and its labels are none")
    if moved.numel() and int(moved.min()) < 0:
        raise DataError(
            f"{domain.name}: offset={offset} makes the label {int(labels.min())} a negative one; classes are numbered "
            "from 0"
        )
    return relabelled(domain, moved, None)


def _said(domain: Domain, options: DataOptions) -> Transform:
    """Return what is said of the images; pixels that are permuted are not resized any more, whatever the model says."""
    said = options.transform
    if options.permute is not None and not said.reshapes and isinstance(domain.samples, TensorDataset):
        height, width = domain.samples.tensors[0].shape[-2:]
        return replace(said, size=(height, width))
    return said


def _drawn(domain: Domain, n: int) -> Domain:
    """Return the domain of a draw of its samples, which says so."""
    size = domain.size or 0
    drawn = draw_evenly(n, size, domain.labels)
    said = describe_draw(n, size, domain.labels, drawn)
    return replace(domain.subset(drawn.tolist()), remarks=(*domain.remarks, said))


def _first_of_stream(domain: Domain, options: DataOptions) -> Domain:
    """Return a stream with as many samples as are wanted: it can only be the first, for the others are not known."""
    wanted = [n for n in (options.first, options.limit) if n is not None]
    if not wanted or not isinstance(domain.samples, TextStream):
        return domain
    said = () if options.limit is None else (f"limit={options.limit} takes the first {min(wanted):,} of a stream",)
    return replace(domain, samples=replace(domain.samples, limit=min(wanted)), remarks=(*domain.remarks, *said))


def _check_options(domain: Domain, options: DataOptions) -> None:
    """Refuse options that this data cannot take, rather than leave them out."""
    samples = domain.samples
    arrays = isinstance(samples, TensorDataset)
    images = isinstance(samples, (ImageFiles, ImageColumn))
    if isinstance(samples, TensorDataset):
        images = not isinstance(samples, Table) and samples.tensors[0].ndim == 4
    others = isinstance(samples, (Texts, TextStream, Generated, Arrays)) or (arrays and not images)
    for asked, possible, reason in (
        (options.transform.mean is not None, not others, "its samples are no images, so they cannot be normalised"),
        (options.changes_images, images, "its samples are no images, so they cannot be resized, turned or permuted"),
        (
            options.offset,
            arrays or isinstance(samples, (Texts, ImageColumn, ImageFiles, Arrays)),
            "offset is for tables, texts, arrays and images",
        ),
        (options.classes, domain.labels is not None, "its labels are not known beforehand, so none can be chosen"),
        (
            options.limit or options.first,
            domain.indexable or isinstance(samples, TextStream),
            "it has no samples by number to limit",
        ),
    ):
        if asked and not possible:
            raise UsageError(f"{domain.name}: {reason}")


_OF_TABLES = (
    *("text", "target", "labels", "length", "pack", "header", "ignore"),
    *("onehot", "missing", "standardise", "unseen", "unit", "decimal", "test", "seed"),
)
_OF_DATASETS = ("config", "revision", "stream")
# Kinds of data that have a place behind a colon, each with its own options.
_PLACES: dict[str, tuple[Callable[[Address, str, Split, DataOptions], Domain], tuple[str, ...]]] = {
    "imagefolder": (load_image_folder, ("labels",)),
    "images": (load_images, ()),
    "npz": (load_npz, ("inputs", "target", "labels")),
    "table": (load_table, _OF_TABLES),
    "csv": (load_table, _OF_TABLES),
    "hf": (load_hugging_face, ("text", "target", "labels", "length", "pack", "unit", *_OF_DATASETS)),
    "text": (load_text, ("length", "pack")),
    "generate": (load_generated, ("length", "prompts", "seed")),
}
_FUNCTION = "package.module:function"

InMemory = tuple[Tensor, Tensor, tuple[str, ...]]


def _torchvision(name: str) -> Callable[[Split, Path], InMemory]:
    def load(split: Split, folder: Path) -> InMemory:
        from torchvision import datasets

        kind = getattr(datasets, name)
        train = split == "train"
        try:
            # torchvision prints as it downloads; stdout is for --json.
            with contextlib.redirect_stdout(sys.stderr):
                try:
                    data = kind(folder, train=train, download=False)
                except RuntimeError:
                    folder.mkdir(parents=True, exist_ok=True)
                    data = kind(folder, train=train, download=True)
        except Exception as error:
            raise DataError(
                f"{name} is not in {folder}, or not whole, and could not be downloaded there "
                f"({type(error).__name__}: {first_line(error)}). Put torchvision's files into that "
                f"folder (delete what is there if it is damaged), or name the one that has them with --data-dir or "
                f"{ENVIRONMENT}"
            ) from error
        images = torch.as_tensor(data.data)
        # (N, H, W) is grey; (N, H, W, C) becomes (N, C, H, W).
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        return images, torch.as_tensor(data.targets, dtype=torch.long), tuple(data.classes)

    return load


def _digits(split: Split, folder: Path) -> InMemory:
    """The 1,797 digits of 8 by 8 pixels that scikit-learn carries, in a fixed split of 4 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("the digits come with scikit-learn; install it: pip install 'ewc-finetune[digits]'") from None
    digits: Any = load_digits()
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(0))
    chosen = order[len(order) // 5 :] if split == "train" else order[: len(order) // 5]
    images = torch.as_tensor(digits.images, dtype=torch.float32)[chosen, None] / 16
    labels = torch.as_tensor(digits.target, dtype=torch.long)[chosen]
    return images, labels, tuple(map(str, digits.target_names))


_IN_MEMORY: dict[str, Callable[[Split, Path], InMemory]] = {
    "mnist": _torchvision("MNIST"),
    "fmnist": _torchvision("FashionMNIST"),
    "kmnist": _torchvision("KMNIST"),
    "cifar10": _torchvision("CIFAR10"),
    "digits": _digits,
}
