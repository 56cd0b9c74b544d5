"""What other people's files and scripts hold on to is as it was: anchors to the byte, run folders, and every `--help`.

What is meant to change is written anew by `EWC_FT_GOLDEN=write python -m pytest tests/test_unchanged.py`, and the
difference says what did.
"""

import hashlib
import json
import os
import re
from pathlib import Path

import click
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune.cli import main
from ewc_finetune.cli.command import Command
from ewc_finetune.cli.grouped_help import full_help

GOLDEN = Path(__file__).parent / "golden"


def check(name, found):
    if os.environ.get("EWC_FT_GOLDEN") == "write":
        (GOLDEN / name).write_text(found)
    assert found == (GOLDEN / name).read_text()


class Even(nn.Module):
    """A classifier of two classes that finds both as likely: every product on the way is exact, on any machine.

    What tells the rows of its last layer from one another is orthogonal to all that the first gives.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 4, bias=False)
        self.last = nn.Linear(4, 2)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor([[1.0, 0.5], [0.25, 2.0], [1.0, 1.0], [0.5, 0.5]]))
            self.last.weight.copy_(torch.tensor([[0.5, 0.25, 1.0, 2.0], [0.5, 0.25, 2.0, 0.0]]))
            self.last.bias.zero_()

    def forward(self, inputs):
        return self.last(torch.relu(self.first(inputs)))


def shaped(value):
    """Keep what does not depend on the machine: of numbers that are computed only that they are there."""
    if isinstance(value, dict):
        return {name: "?" if name in ("versions", "platform") else shaped(part) for name, part in value.items()}
    if isinstance(value, list):
        return [shaped(part) for part in value[:3]]
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}|\d{4}-\d\d-\d\dT.*", value):
        return "?"
    return "number" if isinstance(value, float) else value


@pytest.mark.parametrize("kind", ["diagonal", "kfac", "probe"])
def test_anchors(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    path = tmp_path / "a.safetensors"
    data = TensorDataset(torch.tensor([[1.0, 2.0], [2.0, 0.5], [0.25, 4.0], [8.0, 1.0]]), torch.tensor([0, 1, 0, 1]))
    options = {"curvature": "kfac", "kfac_rank": "full"} if kind == "kfac" else {}
    ewc.consolidate(Even(), data, output=path, probe=2 if kind == "probe" else 0, **options)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    checksums = json.loads(metadata.pop("ewc_checksums"))
    del checksums["__metadata__"]
    document = {
        "tensors": header,
        "metadata": {name: shaped(json.loads(text)) if text[0] in "{[" else text for name, text in metadata.items()},
        "checksums": checksums,
        "sha256": hashlib.sha256(content[8 + length :]).hexdigest(),
    }
    check(f"anchor-{kind}.json", json.dumps(document, indent=1, sort_keys=True) + "\n")


def test_run_folder(tmp_path, ewc_ft):
    model = ("--model", "mlp?hidden=4", "--data", "digits?limit=100")
    ewc_ft("finetune", *model, "--epochs", 1, "--batch-size", 50, "-o", "m.pt")
    ewc_ft("consolidate", "m.pt", "--data", "digits?limit=50", "--probe", 5, "-o", "a.safetensors")
    ewc_ft(
        "finetune", "--anchors", "a.safetensors", "--data", "digits?rotate=90&limit=100", "--eval", "digits?limit=20",
        "--lambda", 30, "--epochs", 2, "--batch-size", 50, "--freeze", "head.bias", "-o", "n.pt",
    )  # fmt: skip
    document = json.loads((tmp_path / "n.run" / "run.json").read_text())
    options = document.pop("options")
    told = {"options": options, **shaped(document)}
    check("run.json", json.dumps(told, indent=1, sort_keys=True).replace(str(tmp_path), "FOLDER") + "\n")
    check("run.toml", (tmp_path / "n.run" / "run.toml").read_text().replace(str(tmp_path), "FOLDER"))


def test_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    wide = {**main.context_settings, "terminal_width": 120, "max_content_width": 120}
    context = click.Context(main, info_name="ewc-ft", **wide)
    said = [main.get_help(context)]
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        said.append(command.get_help(click.Context(command, context, name, **wide)))
        if isinstance(command, Command):
            said.append(full_help(click.Context(command, None, f"ewc-ft {name}", **wide)))
    check("help.txt", "\n\n".join(said) + "\n")
