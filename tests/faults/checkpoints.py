"""Checkpoints of every format, changed at random; run as a program, so that a crash of the reader is seen as one.

`python checkpoints.py FOLDER FORMAT FIRST COUNT` makes the file of that format in the folder, opens changes of it with
the seeds from FIRST on, and prints what was raised that is no error of ours.
"""

from __future__ import annotations

import io
import json
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import archives
import safetensors.torch
import torch
from torch import nn


class Net(nn.Sequential):
    """A small network."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))


def state_dict(path: Path) -> None:
    """An archive of torch.save."""
    torch.save(Net().state_dict(), path)


def legacy(path: Path) -> None:
    """A file as torch.save wrote it before it wrote archives."""
    torch.save(Net().state_dict(), path, _use_new_zipfile_serialization=False)


def weights(path: Path) -> None:
    """A safetensors file of another tool."""
    safetensors.torch.save_file(Net().state_dict(), path)


def onnx(path: Path) -> None:
    """An ONNX file."""
    torch.onnx.export(
        Net().eval(), (torch.randn(2, 4),), path, dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False
    )


FORMATS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "state_dict": ("m.pt", state_dict),
    "legacy": ("m.bin", legacy),
    "safetensors": ("m.safetensors", weights),
    "torchscript": ("m.pt", lambda path: archives.script(path, Net().eval())),
    "exported": ("m.pt2", archives.export),
    "onnx": ("m.onnx", onnx),
}


def changed(content: bytes, draw: random.Random) -> bytes:
    """Bytes with one thing done to them."""
    start = draw.randrange(len(content) or 1)
    end = min(len(content), start + draw.choice((1, 1, 2, 4, 8, 64, 1000)))
    some = bytes(draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256))) for _ in range(end - start))
    return draw.choice(
        (
            content[:start] + some + content[end:],
            content[:start] + content[end:],
            content[:start],
            content[:end] + content[start:],
            content[:start] + some + content[start:],
        )
    )


def changed_archive(content: bytes, draw: random.Random, folder: Path) -> bytes:
    """An archive with one thing done to a member, and checksums that are right all the same."""
    source = folder / "source"
    source.write_bytes(content)
    members = archives.members_of(source)
    name = draw.choice([*members, *(key for key in members if key.endswith((".pkl", ".json", ".py")))] or [""])
    what = draw.randrange(6)
    if what == 0:
        del members[name]
    elif what == 1:
        members[draw.choice(list(members)) + draw.choice(("", "x"))] = members.pop(name)
    elif name.endswith(".json") and what > 2:
        members[name] = json.dumps(changed_document(json.loads(members[name]), draw)).encode()
    else:
        members[name] = changed(members[name], draw)
    return archives.write_members(folder / "written", members).read_bytes()


def changed_document(document: Any, draw: random.Random) -> Any:
    """A JSON document with another value somewhere."""
    parents: list[tuple[Any, Any]] = []
    left = [document]
    while left:
        value = left.pop()
        items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        parents += [(value, key) for key, _ in items]
        left += [item for _, item in items if isinstance(item, (dict, list))]
    parent, key = draw.choice(parents)
    parent[key] = draw.choice(
        (None, True, -1, 2**70, 1e308, "", "x", "__class__", [], {}, [[]], {"as_int": 0}, parent[key])
    )
    return document


def open_and_run(path: Path) -> None:
    """Do what every command does with a checkpoint, as far as it goes."""
    from ewc_finetune.checkpoint.open import open_model
    from ewc_finetune.checkpoint.summary import inspect_checkpoint

    inspect_checkpoint(path)
    open_model(path)


def main(folder: Path, kind: str, first: int, count: int) -> list[str]:
    """Open so many changes, and return what was raised that should not be."""
    from ewc_finetune.errors import EwcError

    name, make = FORMATS[kind]
    torch.manual_seed(0)
    make(folder / name)
    whole = (folder / name).read_bytes()
    found = []
    for seed in range(first, first + count):
        draw = random.Random(seed)
        archive = whole[:2] == b"PK" and draw.random() < 0.7
        (folder / name).write_bytes(changed_archive(whole, draw, folder) if archive else changed(whole, draw))
        (folder / "seed").write_text(str(seed))
        try:
            open_and_run(folder / name)
        except EwcError:
            pass
        except BaseException:  # noqa: BLE001 - whatever it is, it is told
            found.append(f"seed {seed}: {traceback.format_exc(limit=-4)}")
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout = io.StringIO()
    result = main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout = sys.__stdout__
    print(json.dumps(result))
