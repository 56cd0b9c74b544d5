"""Every command through click's runner, as a user would type it, and the ways in which it can go wrong."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.files import change_anchor
from torch import nn

from ewc_finetune import __version__
from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.cli import main

DATA = "digits?limit=300"
NEW = "digits?limit=300&rotate=90"


@pytest.fixture
def start(ewc_ft, tmp_path):
    """A checkpoint and its anchor in the working folder, made by the commands themselves."""
    ewc_ft("finetune", "--model", "mlp?hidden=16", "--data", DATA, "--epochs", 8, "--lr", 0.01, "--output", "model.pt")
    ewc_ft("consolidate", "model.pt", "--data", DATA)
    return tmp_path


def test_the_whole_job(ewc_ft, start):
    result = ewc_ft(
        "finetune", "--anchors", "model.anchor.safetensors", "--data", NEW, "--eval", "digits", "--eval", NEW
    )
    assert re.search(r"digits +0\.\d{4} +0\.\d{4} +[+-]0\.\d{4}", result.stderr)
    assert result.stdout == ""
    assert (start / "model-digits-limit-300-rotate-90.pt").is_file()
    assert (start / "model-digits-limit-300-rotate-90.run" / "figure.png").is_file()
    result = ewc_ft("evaluate", "model-digits-limit-300-rotate-90.pt", "--data", "digits", "--data", NEW, "--json")
    scores = json.loads(result.stdout)["scores"]
    assert [s["domain"] for s in scores] == ["digits", NEW]
    assert [s["samples"] for s in scores] == [359, 300]


def test_consolidate_says_what_it_did(ewc_ft, start):
    result = ewc_ft(
        "consolidate",
        "model.pt",
        "--data",
        DATA,
        "--output",
        "b.safetensors",
        "--name",
        "old",
        "--json",
        "--estimator",
        "sampled",
        "--samples",
        100,
        "--exclude",
        "head.*",
    )
    document = json.loads(result.stdout)
    assert document["sha256"] == Anchor.load("b.safetensors").digest
    assert document["bytes"] == (start / "b.safetensors").stat().st_size
    assert document["provenance"]["samples"] == 100
    assert document["provenance"]["checkpoint"]["architecture"].startswith("mlp?in_features=64&hidden=16")
    assert sum(layer["share"] for layer in document["provenance"]["importance"]) == pytest.approx(1)
    for text in (
        "share of curvature",
        "body.linear1",
        "accuracy 0.",
        "left free: head.weight, head.bias, --exclude head.*",
        "100 samples",
        document["sha256"],
        "1 x 8 x 8, flattened to 64 values",
    ):
        assert text in result.stderr


def test_quiet_is_quiet(ewc_ft, start):
    result = ewc_ft("consolidate", "model.pt", "--data", DATA, "--output", "b.safetensors", "--quiet")
    assert result.output == ""
    assert ewc_ft("evaluate", "model.pt", "--data", DATA, "--quiet").output == ""


def test_an_anchor_can_be_evaluated(ewc_ft, start):
    of_model, of_anchor = (
        json.loads(ewc_ft("evaluate", f, "--data", DATA, "--json", "--quiet").stdout)["scores"]
        for f in ("model.pt", "model.anchor.safetensors")
    )
    assert of_model == of_anchor


def test_same_seed_same_bytes(ewc_ft, start):
    for name in ("one", "two"):
        ewc_ft("consolidate", "model.pt", "--data", DATA, "--output", f"{name}.safetensors", "--estimator", "sampled")
        ewc_ft("finetune", "--anchors", f"{name}.safetensors", "--data", NEW, "--epochs", 1, "--output", f"{name}.pt")
    for kind in ("safetensors", "pt"):
        assert (start / f"one.{kind}").read_bytes() == (start / f"two.{kind}").read_bytes()
    ewc_ft(
        "finetune", "--anchors", "one.safetensors", "--data", NEW, "--epochs", 1, "--output", "three.pt", "--seed", 1
    )
    assert (start / "three.pt").read_bytes() != (start / "one.pt").read_bytes()


def test_somebody_elses_checkpoint_takes_arch_once(ewc_ft, tmp_path):
    (tmp_path / "their_nets.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, width):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))\n"
    )
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)).state_dict(), "theirs.pt")
    result = ewc_ft("consolidate", "theirs.pt", "--data", DATA, expect=1)
    assert "--arch" in result.stderr
    ewc_ft("consolidate", "theirs.pt", "--data", DATA, "--arch", "their_nets:Net?width=8")
    ewc_ft("finetune", "--anchors", "theirs.anchor.safetensors", "--data", NEW, "--epochs", 1, "--output", "new.pt")
    ewc_ft("evaluate", "new.pt", "--data", DATA)
    assert list(torch.load("new.pt", weights_only=True)) == ["1.weight", "1.bias", "3.weight", "3.bias"]


def test_two_anchors(ewc_ft, start):
    ewc_ft("finetune", "--anchors", "model.anchor.safetensors", "--data", NEW, "--epochs", 1, "--output", "second.pt")
    ewc_ft("consolidate", "second.pt", "--data", NEW)
    result = ewc_ft(
        "finetune",
        "--anchors",
        "model.anchor.safetensors",
        "--anchors",
        "second.anchor.safetensors",
        "--lambda",
        10,
        "--lambda",
        20,
        "--data",
        "digits?permute=1",
        "--epochs",
        1,
    )
    assert "counts twice in part" in result.stderr
    assert (start / "second-digits-permute-1.pt").is_file()
    run = json.loads((start / "second-digits-permute-1.run" / "run.json").read_text())
    assert [a["lambda"] for a in run["found"]["anchors"]] == [10, 20]


BAD = {
    "no such checkpoint": (["consolidate", "none.pt", "--data", DATA], 1, "there is no checkpoint at none.pt"),
    "no data": (["consolidate", "model.pt"], 2, "Missing option '--data'"),
    "no such data": (
        ["consolidate", "model.pt", "--data", "mnits", "--output", "new.safetensors"],
        2,
        "Did you mean 'mnist'",
    ),
    "no such estimator": (
        ["consolidate", "model.pt", "--data", DATA, "--estimator", "best"],
        2,
        "'best' is not one of",
    ),
    "negative lambda": (
        ["finetune", "--anchors", "model.anchor.safetensors", "--data", NEW, "--lambda", "-1"],
        2,
        "lambda is -1",
    ),
    "lambda that is no number": (
        ["finetune", "--anchors", "model.anchor.safetensors", "--data", NEW, "--lambda", "x"],
        2,
        "'x'",
    ),
    "lambda nan": (
        ["finetune", "--anchors", "model.anchor.safetensors", "--data", NEW, "--lambda", "nan"],
        2,
        "lambda is nan",
    ),
    "too many lambdas": (
        ["finetune", "--anchors", "model.anchor.safetensors", "--data", NEW, "--lambda", "1", "--lambda", "2"],
        2,
        "2 lambdas for 1 anchor;",
    ),
    "nothing to start from": (["finetune", "--data", NEW], 2, "nothing to start from"),
    "a checkpoint for an anchor": (
        ["finetune", "--anchors", "model.pt", "--data", NEW],
        1,
        "`ewc-ft consolidate model.pt` makes its anchor",
    ),
    "outputs that are not there": (
        ["evaluate", "model.pt", "--data", "digits?active=5-15"],
        1,
        "Error: digits?active=5-15: output 15 is to be active, and the model has 10 outputs",
    ),
    "a wrong shape": (
        ["finetune", "--anchors", "model.anchor.safetensors", "--data", "digits?size=9"],
        1,
        "samples have shape 1 x 9 x 9; the model takes 1 x 8 x 8",
    ),
    "an architecture that does not fit": (
        ["evaluate", "model.pt", "--data", DATA, "--arch", "mlp"],
        1,
        "(16, 64) in the checkpoint and (256, 784) in the architecture",
    ),
    "output exists": (["consolidate", "model.pt", "--data", DATA], 1, "--overwrite"),
    "an unknown option": (["evaluate", "model.pt", "--dta", DATA], 2, "No such option"),
    "an unknown command": (["evalute"], 2, "No such command"),
    "output nowhere": (["consolidate", "model.pt", "--data", DATA, "--output", "no/where"], 1, "does not exist"),
    "a domain twice": (
        ["consolidate", "model.pt", "--data", DATA, "--data", DATA, "--output", "new.safetensors"],
        2,
        "is given twice; weight=2",
    ),
    "no samples": (["consolidate", "model.pt", "--data", DATA, "--samples", "0"], 2, "neither auto nor a number"),
}


def test_bad_input_is_one_sentence_and_an_exit_code(ewc_ft, start):
    before = sorted(p.name for p in start.iterdir())
    for name, (arguments, code, message) in BAD.items():
        result = ewc_ft(*arguments, expect=code)
        assert message in result.stderr, (name, result.stderr)
        assert "Traceback" not in result.output, name
        assert sorted(p.name for p in start.iterdir()) == before, name


def test_damaged_files(ewc_ft, start):
    for content in (b"", b"nonsense" * 10, (start / "model.anchor.safetensors").read_bytes()[:-5]):
        (start / "bad.safetensors").write_bytes(content)
        assert "bad.safetensors" in ewc_ft("finetune", "--anchors", "bad.safetensors", "--data", NEW, expect=1).stderr
        (start / "bad.pt").write_bytes(content)
        assert "bad.pt" in ewc_ft("consolidate", "bad.pt", "--data", DATA, expect=1).stderr
    torch.save(nn.Linear(2, 2), "pickled.pt")
    assert "asks for more than tensors" in ewc_ft("consolidate", "pickled.pt", "--data", DATA, expect=1).stderr


def test_anchors_of_different_models_are_refused(ewc_ft, start):
    ewc_ft("finetune", "--model", "mlp?hidden=8", "--data", DATA, "--epochs", 1, "--output", "other.pt")
    ewc_ft("consolidate", "other.pt", "--data", DATA)
    arguments = [
        "finetune",
        "--anchors",
        "other.anchor.safetensors",
        "--anchors",
        "model.anchor.safetensors",
        "--data",
        NEW,
    ]
    result = ewc_ft(*arguments, expect=1)
    assert "other.anchor.safetensors does not fit the model" in result.stderr
    assert "(8,) in the anchor and (16,) in the model" in result.stderr


def test_a_negative_fisher_in_a_file_is_refused(ewc_ft, start):
    def negate(_, tensors):
        tensors["fisher.head.bias"][0] = -1

    change_anchor("model.anchor.safetensors", negate, "bad.safetensors")
    assert (
        "fisher.head.bias holds negative"
        in ewc_ft("finetune", "--anchors", "bad.safetensors", "--data", NEW, expect=1).stderr
    )


def test_debug_shows_the_traceback_and_keeps_the_exit_code(ewc_ft):
    result = ewc_ft("evaluate", "none.pt", "--data", DATA, "--debug", expect=1)
    assert "Traceback" in result.stderr
    assert "CheckpointError: there is no checkpoint at none.pt" in result.stderr
    ewc_ft("finetune", "--data", DATA, "--debug", expect=2)


def test_interrupted_work_is_not_lost_to_overwrite(ewc_ft, start):
    ewc_ft("finetune", "--model", "model.pt", "--data", NEW, "--epochs", 1, "--output", "new.pt")
    kept = {p.name: p.read_bytes() for p in (start / "new.run").iterdir()}
    (start / "new.run" / "last.pt").write_bytes((start / "model.pt").read_bytes())
    arguments = ["--data", NEW, "--output", "new.pt", "--overwrite"]
    result = ewc_ft("finetune", "--model", "new.run/last.pt", *arguments, expect=1)
    assert "new.run/last.pt lies in the run folder new.run" in result.stderr
    (start / "new.run" / "last.pt").unlink()
    # A run that fails before it has anything to keep puts the earlier one back.
    ewc_ft("finetune", "--model", "model.pt", *arguments, "--optimizer", "sgd", "--lr", 1e30, expect=1)
    assert {p.name: p.read_bytes() for p in (start / "new.run").iterdir()} == kept
    ewc_ft("finetune", "--model", "model.pt", *arguments, "--epochs", 0)
    assert not list(start.glob(".*"))


def test_outputs_with_dots_have_run_folders_of_their_own(ewc_ft, start):
    for name in ("v1.0", "v1.1"):
        ewc_ft("finetune", "--model", "model.pt", "--data", NEW, "--epochs", 0, "--output", name)
        assert (start / f"{name}.run" / "run.json").is_file()


def test_an_error_nobody_foresaw_asks_for_a_report(ewc_ft, monkeypatch):
    import ewc_finetune.commands.evaluate

    def fail(*args, **kwargs):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(ewc_finetune.commands.evaluate, "evaluate", fail)
    result = ewc_ft("evaluate", "m.pt", "--data", DATA, expect=1)
    assert "ZeroDivisionError: oh" in result.stderr
    assert "--debug" in result.stderr


def test_version_and_help(ewc_ft):
    assert __version__ in ewc_ft("--version").stdout
    for command in ((), ("consolidate",), ("finetune",), ("evaluate",)):
        assert "Usage: " in ewc_ft(*command, "--help").stdout
    assert "\n  ewc-ft consolidate model.pt --data mnist " in ewc_ft("--help").stdout
    assert "\\b" not in ewc_ft("--help").stdout
    shown = subprocess.run([sys.executable, "-m", "ewc_finetune", "--help"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("Usage: ewc-ft")


def spawn(arguments, folder, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "ewc_finetune", *map(str, arguments)],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def wait_for(path, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


LONG = ["finetune", "--anchors", "model.anchor.safetensors", "--data", NEW, "--epochs", 100_000, "--output", "long.pt"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupting_a_finetune_keeps_the_last_epoch(start, number, code):
    process = spawn(LONG, start)
    wait_for(start / "long.run" / "last.pt", process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert "last.pt" in errors
    assert "Traceback" not in errors
    assert not (start / "long.pt").exists()
    assert torch.load(start / "long.run" / "last.pt", weights_only=True)
    assert json.loads((start / "long.run" / "run.json").read_text())["status"] == "interrupted"
    assert not list(start.rglob("*.tmp"))


@pytest.mark.slow
def test_interrupting_a_consolidation_leaves_nothing(start):
    before = sorted(p.name for p in start.iterdir())
    process = spawn(
        ["consolidate", "model.pt", "--data", "digits", "--batch-size", 1, "--output", "c.safetensors"], start
    )
    assert "8 x 8" in process.stderr.readline()  # the work begins
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert sorted(p.name for p in start.iterdir()) == before


@pytest.mark.slow
def test_sigkill_leaves_whole_lines_and_no_checkpoint(start):
    process = spawn([*LONG, "--log-every", 1], start)
    wait_for(start / "long.run" / "last.pt", process)
    process.kill()
    process.communicate(timeout=30)
    for line in (start / "long.run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    assert not (start / "long.pt").exists()
    assert torch.load(start / "long.run" / "last.pt", weights_only=True)


@pytest.mark.slow
def test_two_at_once_do_not_share_a_run_folder(start):
    first = spawn(LONG, start)
    wait_for(start / "long.run" / "last.pt", first)
    second = spawn(LONG, start)
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 1, errors
    assert "the run folder long.run exists (status: running)" in errors
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)
    assert torch.load(start / "long.run" / "last.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["consolidate", "finetune"])
def test_a_disk_without_room(start, command):
    """A limit on the size of files stands for the end of the disk: writes fail in the middle."""

    def little_room():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    arguments = {
        "consolidate": ["consolidate", "model.pt", "--data", DATA, "--output", "full.safetensors"],
        "finetune": ["finetune", "--model", "model.pt", "--data", NEW, "--epochs", 1, "--output", "full.pt"],
    }[command]
    before = sorted(p.name for p in start.iterdir())
    process = spawn(arguments, start, preexec_fn=little_room, env={**os.environ, "MPLCONFIGDIR": str(start / "mpl")})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "cannot write" in errors
    assert "Traceback" not in errors
    assert sorted(p.name for p in start.iterdir() if p.name != "mpl") == before


def test_the_fisher_of_a_folder_of_images(ewc_ft, start, tmp_path):
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for n in range(12):
        path = tmp_path / "logged" / f"day{n % 3}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(torch.randint(0, 256, (8, 8), generator=generator, dtype=torch.uint8).numpy()).save(path)
    result = ewc_ft(
        "consolidate", "model.pt", "--data", "images:logged?channels=1", "--output", "c.safetensors", "--json",
        "--draws", 3, "--estimator", "sampled",
    )  # fmt: skip
    origin = json.loads(result.stdout)["provenance"]
    assert origin["samples"] == 12
    assert origin["draws"] == 3
    assert origin["scores"] == {}
    assert "layer rules for" in result.stderr
    assert "own score" not in result.stderr
    result = ewc_ft("evaluate", "model.pt", "--data", "images:logged?channels=1", expect=1)
    assert "images:logged?channels=1 has no labels, and a score needs them" in result.stderr


def test_consolidate_stops_by_itself(ewc_ft, start):
    result = ewc_ft(
        "consolidate", "model.pt", "--data", "digits", "--samples", "auto", "--rtol", "0.2", "--output", "d.safetensors"
    )
    assert re.search(r"stopped after \d+ samples: the trace's standard error is \d+\.\d%", result.stderr)
    assert re.search(r"error", result.stderr)
    result = ewc_ft(
        "consolidate", "model.pt", "--data", DATA, "--samples", "auto", "--rtol", "2", "--overwrite", expect=2
    )
    assert "rtol is 2; expected more than 0 and less than 1" in result.stderr


@pytest.fixture
def two(ewc_ft, start):
    """Two anchors: of the start, and of what was fine-tuned under it."""
    ewc_ft("finetune", "--anchors", "model.anchor.safetensors", "--data", NEW, "--epochs", 1, "--output", "new.pt")
    ewc_ft("consolidate", "new.pt", "--data", NEW, "--name", "turned")
    return start


def test_merge_and_inspect(ewc_ft, two):
    both = ("model.anchor.safetensors", "new.anchor.safetensors")
    result = ewc_ft("merge", *both, "--lambda", 1, "--lambda", 2, "-o", "both.safetensors", "--json")
    assert "new.anchor.safetensors was made from a checkpoint that model.anchor.safetensors already" in result.stderr
    document = json.loads(result.stdout)
    assert document["sha256"] == Anchor.load("both.safetensors").digest
    assert [parent["lambda"] for parent in document["provenance"]["merged"]["parents"]] == [1.0, 2.0]
    ewc_ft("finetune", "--anchors", "both.safetensors", "--data", NEW, "--epochs", 1, "--output", "after.pt")
    result = ewc_ft("inspect", "both.safetensors", "--plot", "both.png", "--json")
    for text in (
        "digits+turned",
        "merged offline, lineage all, from 2 anchors",
        "mlp?in_features=64",
        "parent 2",
        "turned, lambda 2",
        "body.linear1",
        "share of curvature",
        "lineage  ",
    ):
        assert text in result.stderr
    assert (two / "both.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(result.stdout)
    assert document["bytes"] == (two / "both.safetensors").stat().st_size
    assert document["tensors"]["fisher"]["numbers"] == document["tensors"]["anchor"]["numbers"]
    ewc_ft("merge", *both, "--output", "both.safetensors", expect=1)
    ewc_ft("inspect", "both.safetensors", "--plot", "both.png", expect=1)
    ewc_ft("inspect", "both.safetensors", "--plot", "both.pdf")
    assert (two / "both.pdf").read_bytes().startswith(b"%PDF")
    ewc_ft("merge", "both.safetensors", "-o", "dollar.safetensors", "--name", "costs $^$ or $$")
    ewc_ft("inspect", "dollar.safetensors", "--plot", "dollar.png")
    assert "should end in .png, .pdf, .svg" in ewc_ft("inspect", "both.safetensors", "--plot", "both", expect=2).stderr
    assert "format         state_dict" in ewc_ft("inspect", "model.pt").stderr
    ewc_ft("merge", "--output", "none.safetensors", expect=2)


def test_merge_writes_the_centre_as_a_model(ewc_ft, two):
    both = ("model.anchor.safetensors", "new.anchor.safetensors")
    ewc_ft("merge", *both, "-o", "both.safetensors", "--checkpoint", "both.pt", "--lineage", "latest")
    result = ewc_ft("evaluate", "both.pt", "--data", "digits", "--json")
    # Its anchors all pull to the newest weights, so the centre is the newest model.
    newest = ewc_ft("evaluate", "new.pt", "--data", "digits", "--json")
    found, expected = (json.loads(r.stdout)["scores"][0] for r in (result, newest))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_the_online_form(ewc_ft, two):
    both = ("model.anchor.safetensors", "new.anchor.safetensors")
    ewc_ft("merge", *both, "-o", "running.safetensors", "--online", "--gamma", 0.9)
    old, new, running = (Anchor.load(path) for path in (*both, "running.safetensors"))
    for name, value in running.fisher.items():
        torch.testing.assert_close(value, 0.9 * old.fisher[name] + new.fisher[name])
        assert torch.equal(running.weights[name], new.weights[name])
    result = ewc_ft("inspect", "running.safetensors")
    assert "merged online, gamma 0.9, from 2 anchors" in result.stderr
    assert (
        "gamma belongs to the online form"
        in ewc_ft("merge", *both, "-o", "x.safetensors", "--gamma", 0.9, expect=2).stderr
    )


def test_inspect_an_anchor_without_importance_in_it(ewc_ft, start):
    tensors = load_file("model.anchor.safetensors")
    save_file(tensors, "old.safetensors", {"format": "ewc-anchor", "format_version": "1", "anchor": '{"name": "old"}'})
    result = ewc_ft("inspect", "old.safetensors")
    assert "of no recorded architecture" in result.stderr
    assert "body.linear1" in result.stderr


def test_kfac_anchors_through_every_command(ewc_ft, start):
    kfac = ("--curvature", "kfac", "--kfac-rank", "0.9")
    ewc_ft("consolidate", "model.pt", "--data", DATA, *kfac, "-o", "a.safetensors")
    options = ("--data", NEW, "--epochs", 1)
    result = ewc_ft("finetune", "--anchors", "a.safetensors", *options, "-o", "new.pt")
    assert "exact K-FAC blocks of 300 samples, lambda 10" in result.stderr
    ewc_ft("consolidate", "new.pt", "--data", NEW, *kfac, "--kfac-dtype", "float32", "-o", "b.safetensors")
    both = ("a.safetensors", "b.safetensors")
    merge = ("merge", *both, "--lineage", "latest", "--kfac-sum", "factors", "--kfac-rank", "full")
    result = ewc_ft(*merge, "-o", "m.safetensors", "--checkpoint", "m.pt")
    assert re.search(r"stand for sums \(factors\) are off by up to \d+% \(\S+; Frobenius norm", result.stderr)
    facts = ewc_ft("inspect", "m.safetensors").stderr
    assert "K-FAC blocks and diagonal Fisher, merged offline, lineage latest, factors for sums of blocks" in facts
    assert re.search(r"in blocks +2 layers, [\d,]+ bytes, \d\.\d\d of their diagonal's; \d\.\d million products", facts)
    assert re.search(r"body.linear1 +input 65 rows, 8,580 bytes, output 16 rows, 544 bytes", facts)
    assert "eigenvectors with 9" in ewc_ft("inspect", "a.safetensors").stderr
    # Alone, and in one stack with the diagonal of the same model.
    more = ("--data", "digits?limit=300&rotate=180", "--epochs", 1)
    ewc_ft("finetune", "--anchors", "m.safetensors", *more, "--penalty-form", "proximal", "-o", "third.pt")
    result = ewc_ft(
        "finetune", "--anchors", "model.anchor.safetensors", "--anchors", "b.safetensors", *more, "-o", "4.pt"
    )
    assert "the anchors differ in curvature" in result.stderr
    refused = ewc_ft("merge", "model.anchor.safetensors", "b.safetensors", "-o", "no.safetensors", expect=1)
    assert "is held by a K-FAC block in one anchor and by a diagonal in another" in refused.stderr
    assert not (start / "no.safetensors").exists()
    refused = ewc_ft("merge", *both, "-o", "no.safetensors", "--kfac-rank", "half", expect=2)
    assert "'half' is neither auto, full, a share nor a whole number" in refused.stderr


def test_identity_curvature(ewc_ft, start):
    result = ewc_ft("consolidate", "model.pt", "--data", DATA, "--curvature", "identity", "--output", "l2.safetensors")
    assert "curvature: the identity" in result.stderr
    anchor = Anchor.load("l2.safetensors")
    assert all((f == 1).all() for f in anchor.fisher.values())
    assert (anchor.provenance.curvature, anchor.provenance.samples) == ("identity", 0)
    assert "identity (plain L2)" in ewc_ft("inspect", "l2.safetensors").stderr
    ewc_ft("finetune", "--anchors", "l2.safetensors", "--data", NEW, "--lambda", 1e6, "--optimizer", "sgd",
           "--penalty-form", "proximal", "--epochs", 1, "--output", "held.pt")  # fmt: skip
    held, start = (torch.load(path, weights_only=True) for path in ("held.pt", "model.pt"))
    for name, value in start.items():
        torch.testing.assert_close(held[name], value, rtol=0, atol=1e-3)


def test_a_lambda_that_gradient_steps_cannot_take_is_announced(ewc_ft, start):
    options = ("finetune", "--anchors", "model.anchor.safetensors", "--data", NEW, "--epochs", 0, "--optimizer", "sgd")
    result = ewc_ft(*options, "--lambda", 1e8, "--output", "a.pt")
    assert re.search(
        r"too large for gradient steps: the largest lambda F, \S+ in \S+, times the learning", result.stderr
    )
    assert "--penalty-form proximal, stable at any lambda, or --lr up to" in result.stderr
    for others in (("--lambda", 1), ("--lambda", 1e8, "--penalty-form", "proximal")):
        assert "too large" not in ewc_ft(*options, *others, "--output", "a.pt", "--overwrite").stderr


def test_likelihoods_that_contradict_each_other(ewc_ft, start):
    result = ewc_ft(
        "finetune", "--anchors", "model.anchor.safetensors", "--data", NEW, "--likelihood", "bernoulli", expect=2
    )
    assert "likelihood is bernoulli, and model.anchor.safetensors was made with categorical" in result.stderr


@pytest.mark.parametrize(
    "stage", ["ewc_finetune.commands.merge.sum_quadratics", "ewc_finetune.storage.atomic.os.fsync"]
)
def test_an_interrupted_merge_leaves_no_file(ewc_ft, start, monkeypatch, stage):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, interrupted)
    before = set(start.iterdir())
    ewc_ft("merge", "model.anchor.safetensors", "-o", "out.safetensors", expect=130)
    assert set(start.iterdir()) == before


def test_what_must_be_said_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, option in (
        (["merge", "a.safetensors"], "--output"),
        (["mend", "m.pt", "--anchors", "a.safetensors"], "--data"),
        (["finetune", "--anchors", "a.safetensors"], "--data"),
        (["evaluate", "m.pt"], "--data"),
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert f"Missing option '{option}'" in result.output
