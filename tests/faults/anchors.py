"""Anchors that somebody has changed: headers and provenance with values of other types, names and shapes.

As a program it makes many, and prints what came of each kind and every exception that is not ours:
`python tests/faults/anchors.py 20000 --seed 1`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune.checkpoint.architecture import build
from ewc_finetune.cli.layer_table import layer_table
from ewc_finetune.cli.printer import Printer
from ewc_finetune.commands.inspect import inspect
from ewc_finetune.errors import EwcError
from ewc_finetune.storage.checksums import KEY as CHECKSUMS

ARCHITECTURE = "mlp?in_features=4&hidden=3&num_classes=3&batch_norm=true"


def samples() -> TensorDataset:
    """Twelve samples of four numbers, in three classes."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(12, 4, generator=generator), torch.arange(12) % 3)


def make_anchors(folder: Path) -> dict[str, Path]:
    """Write an anchor of each sort, small ones."""
    torch.manual_seed(0)
    model = build(ARCHITECTURE, trusted=True).eval()
    sorts: dict[str, dict[str, Any]] = {
        "diagonal": {"probe": 3},
        "half": {"curvature_dtype": "float16"},
        "kfac": {"curvature": "kfac", "kfac_rank": 2},
        "whole": {"curvature": "kfac", "kfac_rank": "full"},
    }
    paths = {sort: folder / f"{sort}.safetensors" for sort in [*sorts, "merged", "merged-kfac"]}
    for sort, options in sorts.items():
        ewc.consolidate(model, samples(), name=sort, architecture=ARCHITECTURE, output=paths[sort], **options)
    ewc.merge([paths["diagonal"], paths["half"]], output=paths["merged"])
    ewc.merge([paths["kfac"], paths["whole"]], output=paths["merged-kfac"])
    return paths


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of an anchor without checksums, with the provenance as a document, and what is behind it."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"].pop(CHECKSUMS, None)
    header["__metadata__"]["anchor"] = json.loads(header["__metadata__"]["anchor"])
    return header, content[8 + length :]


def write(path: Path, header: dict[str, Any], data: bytes) -> None:
    """Write what `read` gave."""
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and not isinstance(metadata.get("anchor"), str):
        header = {**header, "__metadata__": {**metadata, "anchor": json.dumps(metadata.get("anchor"))}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


# What a value is changed to, whatever it was.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -1.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\ud800", "\udcff.safetensors", "a" * 5000, "../../etc", "\x00", "\x1b[2K", "hf://a/b", "mlp", "0"),
    *([], [1], ["x"], [None], [[]], [{}], {}, {"x": 1}, {"": None}, {"\ud800": "\ud800"}, _deep(50), _deep(500)),
)
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64", "BOOL", "C64", "F8_E4M3",
          "F8_E5M2", "F8_E8M0", "F4", "X", "")  # fmt: skip
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Go through the keys that lead to each value within a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from _places(inner, (*at, key))


def _change(document: Any, rng: random.Random) -> None:
    """Change, drop, copy or rename one value somewhere in a document."""
    places = list(_places(document))
    if not places:
        return
    *path, key = rng.choice(places)
    holder = document
    for step in path:
        holder = holder[step]
    how = rng.randrange(6)
    if how < 4:
        holder[key] = json.loads(json.dumps(rng.choice(VALUES)))  # a copy
    elif how == 4:
        del holder[key]
    elif isinstance(holder, dict):
        holder[rng.choice(["\ud800", "", "x" * 300, "a.b", *holder])] = holder.pop(key)
    else:
        holder *= 2


def change_provenance(header: dict[str, Any], data: bytes, rng: random.Random) -> bytes:
    """Change values of the provenance."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        _change(header["__metadata__"]["anchor"], rng)
    return data


def change_header(header: dict[str, Any], data: bytes, rng: random.Random) -> bytes:
    """Change values of the header: names, types, shapes, places."""
    _change(header, rng)
    return data


def change_type(header: dict[str, Any], data: bytes, rng: random.Random) -> bytes:
    """Give a tensor another type or shape that takes the same bytes: the file stays whole."""
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    start, end = entry["data_offsets"]
    entry["dtype"] = rng.choice(DTYPES)
    numbers = (end - start) // _SIZES.get(entry["dtype"], 1)
    shapes = ([numbers], [1] * 65 + [numbers], [1] * 200 + [numbers], [numbers, 1], [1, 1, numbers], entry["shape"], [])
    entry["shape"] = rng.choice(shapes)
    return data


def change_names(header: dict[str, Any], data: bytes, rng: random.Random) -> bytes:
    """Exchange two tensors, or call one otherwise."""
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    if rng.random() < 0.5:
        header[one], header[other] = header[other], header[one]
    else:
        group = rng.choice(["fisher.", "anchor.", "buffer.", "kfac.", "probe.", "scale.", "", "x."])
        header[group + rng.choice(["", "\ud800", "x", one.partition(".")[2], "0.inputs"])] = header.pop(one)
    return data


def change_numbers(header: dict[str, Any], data: bytes, rng: random.Random) -> bytes:
    """Change numbers of a tensor to whatever bytes are."""
    entry = rng.choice([entry for name, entry in header.items() if name != "__metadata__"])
    start, end = entry["data_offsets"]
    if start == end:
        return data
    at = rng.randrange(start, end)
    length = min(end - at, rng.choice([1, 4, 64]))
    changed = rng.choice([rng.randbytes(length), b"\xff" * length, b"\x00\x00\x80\x7f" * 16])[:length]
    return data[:at] + changed + data[at + length :]


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    """Change, cut or repeat bytes anywhere, most of them in the header."""
    changed = bytearray(content)
    length = int.from_bytes(content[:8], "little")
    for _ in range(rng.choice([1, 1, 3, 20])):
        at = rng.randrange(min(len(changed), rng.choice([8, 8 + length, len(changed)])))
        changed[at] = rng.randrange(256)
    if rng.random() < 0.2:
        del changed[rng.randrange(len(changed)) :]
    return bytes(changed)


CHANGES: tuple[Callable[[dict[str, Any], bytes, random.Random], bytes], ...] = (
    *(change_provenance,) * 4,
    *(change_header, change_type, change_names, change_numbers),
)


def mutate(path: Path, to: Path, rng: random.Random) -> str:
    """Write an anchor that was changed, and return in what way."""
    if rng.random() < 0.1:
        to.write_bytes(change_bytes(path.read_bytes(), rng))
        return "bytes"
    header, data = read(path)
    change = rng.choice(CHANGES)
    write(to, header, change(header, data, rng))
    return change.__name__.removeprefix("change_")


def _inspect(path: Path, other: Path, folder: Path) -> None:
    found = inspect(path)
    printer = Printer(quiet=False, verbose=True, as_json=True)
    printer.facts(found.facts)
    layer_table(printer, found.provenance)
    printer.result(found.to_json(), "inspect-anchor")


def _merge(path: Path, other: Path, folder: Path) -> None:
    ewc.merge([path, other], output=folder / "m.safetensors", checkpoint=folder / "m.pt", overwrite=True)


def _merge_online(path: Path, other: Path, folder: Path) -> None:
    ewc.merge([other, path], online=True, gamma=0.5, output=folder / "m.safetensors", overwrite=True)


def _finetune(path: Path, other: Path, folder: Path) -> None:
    ewc.dry_run(ewc.finetune, None, samples(), anchors=path, eval_on=[samples()], output=folder / "o.pt", epochs=1)


def _stack(path: Path, other: Path, folder: Path) -> None:
    model = build(ARCHITECTURE, trusted=True)
    ewc.dry_run(ewc.finetune, model, samples(), anchors=[other, path], lineage="latest", eval_on=[], epochs=1)


ACTIONS: dict[str, Callable[[Path, Path, Path], None]] = {
    "inspect": _inspect,
    "merge": _merge,
    "merge online": _merge_online,
    "finetune": _finetune,
    "stack": _stack,
}


@dataclass(frozen=True)
class Fault:
    """An exception that is not ours.

    Attributes:
        number: Of the mutated anchor.
        way: In which it was changed.
        action: What was done with it.
        text: The traceback.
    """

    number: int
    way: str
    action: str
    text: str


def hunt(count: int, seed: int, folder: Path) -> tuple[Counter[tuple[str, str]], list[Fault]]:
    """Make mutated anchors and try everything on them; return what came of it, and what should not have.

    Each is made from a seed of its own: number 7 is the same however many there are.
    """
    originals = list(make_anchors(folder).values())
    outcomes: Counter[tuple[str, str]] = Counter()
    faults: list[Fault] = []
    mutated = folder / "mutated.safetensors"
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        original = rng.choice(originals)
        way = mutate(original, mutated, rng)
        chosen = {"inspect", rng.choice(list(ACTIONS))}
        for action in sorted(chosen):
            try:
                with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                    warnings.simplefilter("error")
                    ACTIONS[action](mutated, original, folder)
                outcomes[way, "taken"] += 1
            except EwcError as error:
                str(error).encode("utf-8", "backslashreplace")
                outcomes[way, "refused"] += 1
            except Exception:  # noqa: BLE001 - that is what is looked for
                outcomes[way, "FAULT"] += 1
                faults.append(Fault(number, way, action, traceback.format_exc()))
    return outcomes, faults


def main() -> None:
    """Hunt, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, faults = hunt(options.count, options.seed, Path(folder))
    for (way, outcome), times in sorted(outcomes.items()):
        print(f"{way:<12}{outcome:<10}{times:>8,}")
    kinds = Counter("\n".join(fault.text.splitlines()[-3:]) for fault in faults)
    for text, times in kinds.most_common():
        first = next(fault for fault in faults if fault.text.splitlines()[-3:] == text.splitlines())
        print(f"\n{times} times, first with number {first.number} ({first.way}, {first.action}):\n{first.text}")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
