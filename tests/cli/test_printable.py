"""What files say reaches the screen as text, and nothing in it is obeyed by a terminal."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import ewc_finetune as ewc
from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.state_dict import save_state_dict
from ewc_finetune.cli.printable import printable

EVIL = "\x1b]0;owned\x07\x1b[2Kfine\rgone\u202eback\x9b1m\ndone: all is well\u2028\ud800\x00"
SAFE = r"\x1b]0;owned\x07\x1b[2Kfine gone\u202eback\x9b1m done: all is well \ud800\x00"
FORBIDDEN = set("\x1b\x07\r\x9b\u202e\u2028\ud800\x00")
DATA = "digits?limit=40"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (EVIL, SAFE),
        ("café  naïve\u00a0日本 \U0001f469\u200d\U0001f52c", "café  naïve\u00a0日本 \U0001f469\u200d\U0001f52c"),
        ("one\r\n  two\tthree", "one two three"),
        ("", ""),
        (os.fsdecode(b"p\xff.pt"), r"p\udcff.pt"),
    ],
)
def test_text_is_shown_and_not_obeyed(text, shown):
    assert printable(text) == shown


@pytest.fixture
def anchor(small, samples, tmp_path):
    return ewc.consolidate(small, samples, name="old", output=tmp_path / "old.anchor.safetensors")


def check(result):
    assert not FORBIDDEN & set(result.output)
    assert "\ndone: all is well" not in result.output
    assert "all is well" in result.output


def test_an_anchors_provenance(ewc_ft, anchor, tmp_path):
    origin = replace(
        anchor.provenance,
        name=EVIL,
        checkpoint={**anchor.provenance.checkpoint, "file": EVIL, "architecture": EVIL},
        data={"spec": EVIL, "split": EVIL, "size": EVIL},
        excluded={EVIL: EVIL},
        classes=[EVIL],
        importance=[{**anchor.provenance.importance[0], "layer": EVIL}],
    )
    replace(anchor, provenance=origin).save(tmp_path / "evil.safetensors")
    for arguments in (
        ["inspect", "evil.safetensors"],
        ["inspect", "evil.safetensors", "--json"],
    ):
        check(ewc_ft(*arguments))
    ewc_ft("merge", "evil.safetensors", "-o", "merged.safetensors")
    check(ewc_ft("inspect", "merged.safetensors"))
    check(ewc_ft("finetune", "--anchors", "evil.safetensors", "--data", DATA, expect=1))
    debugged = ewc_ft("finetune", "--anchors", "evil.safetensors", "--data", DATA, "--debug", expect=1)
    assert "Traceback" in debugged.stderr
    assert not FORBIDDEN & set(debugged.output)


def test_errors_that_quote_a_file(ewc_ft, tmp_path):
    torch.save({EVIL: torch.ones(2)}, tmp_path / "names.pt")
    check(ewc_ft("evaluate", "names.pt", "--data", DATA, "--arch", "mlp", expect=1))
    save_state_dict(tmp_path / "record.pt", nn.Linear(2, 2), ModelMetadata(architecture=f"a:{EVIL}"))
    check(ewc_ft("inspect", "record.pt"))
    (tmp_path / "x.toml").write_text(f"data = {json.dumps(EVIL.replace(chr(0xD800), ''))}\nmodel = 'mlp'\n")
    check(ewc_ft("finetune", "--config", "x.toml", expect=2))
    (tmp_path / "y.toml").write_text(f"{json.dumps(EVIL.replace(chr(0xD800), ''))} = 1\n")
    check(ewc_ft("finetune", "--config", "y.toml", expect=2))


def test_a_runs_record(ewc_ft, tmp_path):
    ewc_ft("finetune", "--model", "mlp", "--data", DATA, "--epochs", 0, "--output", "o.pt")
    document = json.loads((tmp_path / "o.run" / "run.json").read_text())
    (tmp_path / "o.run" / "run.json").write_text(json.dumps({**document, "status": EVIL}))
    (tmp_path / "o.pt").unlink()
    check(ewc_ft("finetune", "--model", "mlp", "--data", DATA, "--output", "o.pt", "--epochs", 0, expect=1))


def test_paths_that_are_no_text(tmp_path):
    """In a process of its own: a path on the command line may be any bytes."""
    name = b"\xff\x1b[2K.pt"
    (tmp_path / os.fsdecode(name)).write_bytes(b"hello")
    for command in (["inspect"], ["evaluate", "--data", DATA]):
        done = subprocess.run(
            [sys.executable, "-m", "ewc_finetune", command[0], name, *command[1:]],
            cwd=tmp_path, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr.startswith(rb"Error: \udcff\x1b[2K.pt is "), done.stderr


def test_what_torch_logs_of_a_damaged_program_is_not_printed(tmp_path):
    """In a process of its own, whose stderr is seen whole."""
    script = (
        "import sys, torch, zipfile\n"
        "program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(3, 2),),"
        " dynamic_shapes=({0: torch.export.Dim('batch')},))\n"
        "torch.export.save(program, 'whole.pt2')\n"
        "with zipfile.ZipFile('whole.pt2') as whole, zipfile.ZipFile('cut.pt2', 'w') as cut:\n"
        "    for name in whole.namelist():\n"
        "        found = whole.read(name)\n"
        "        model = 'models/' in name and name.endswith('.json')\n"
        "        cut.writestr(name, found.replace(b'torch.ops.aten', b'torch.ops.none') if model else found)\n"
        "from ewc_finetune.__main__ import main\n"
        "sys.argv = ['ewc-ft', 'inspect', 'cut.pt2']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: cut.pt2 ")
    assert done.stderr.count("\n") == 1
