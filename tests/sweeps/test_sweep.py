"""Many fine-tunes, and the frontier that they make."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.domains import corners as blobs
from support.models import Small, trained
from support.notes import Notes
from support.run_folders import anchor as recorded_anchor
from support.run_folders import score as recorded_score
from support.run_folders import write_language_model, write_run

import ewc_finetune as ewc
from ewc_finetune.errors import EwcError, StorageError, UsageError
from ewc_finetune.reporting.frontier import knee, pareto
from ewc_finetune.reporting.measures import NOTHING
from ewc_finetune.reporting.outcome import outcome_of
from ewc_finetune.reporting.tradeoff import Row, trade_off
from ewc_finetune.runs.record import read_run
from ewc_finetune.specs.ranges import read_lambdas, read_seeds

OLD, NEW = "digits?limit=300", "digits?rotate=90&limit=300"
EVAL = ("--eval", "digits?limit=50", "--eval", "digits?rotate=90&limit=50")


@pytest.fixture(scope="module")
def job():
    """A model that knows one domain, its anchor, and the options of a sweep over another."""
    model = trained(Small(), torch.float32)
    ewc.finetune(model, blobs(0), epochs=10, lr=3e-2, eval_on=[])
    return model, ewc.consolidate(model, blobs(0)), {
        "lambdas": [1, 100], "epochs": 1, "lr": 1e-2, "batch_size": 20,
        "eval_on": {"old": blobs(0), "new": blobs(1, shift=1)},
    }  # fmt: skip


def swept(job, output, data=None, **changes):
    model, anchor, options = job
    data = blobs(2, shift=1) if data is None else data
    return ewc.sweep(model, data, **{"anchors": anchor, "output": output, **options, **changes})


def names(folder):
    return sorted(path.name.removesuffix(".run") for path in folder.glob("*.run"))


def table_of(folder):
    return list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))


# ---- ranges, the frontier and its knee


def test_lambdas_in_a_word():
    assert read_lambdas("1..1000:4") == [1, 10, 100, 1000]
    assert read_lambdas("1..100:4") == [1, 4.642, 21.54, 100]
    assert read_lambdas("0,1e-3,2") == [0, 0.001, 2]
    assert read_lambdas("0.5..2:2,7") == [0.5, 2, 7]
    assert read_seeds("0..3") == [0, 1, 2, 3]
    assert read_seeds("5,2..3") == [5, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto", "finetune --lambda auto looks for one"),
        ("lots", "'lots' is no lambda"),
        ("", "is no lambda"),
        ("1..10", "should say how many values"),
        ("1..10:1", "at least 2"),
        ("10..1:3", "to a larger one"),
        ("0..1:3", "from a number above 0"),
        ("nan..1:3", "from a number above 0"),
    ],
)
def test_no_lambdas(text, message):
    with pytest.raises(UsageError, match=message):
        read_lambdas(text)


@pytest.mark.parametrize("text", ["-1", "x", "3..1", "1..", "1.5", ""])
def test_no_seeds(text):
    with pytest.raises(UsageError, match="seed|empty"):
        read_seeds(text)


@given(st.floats(1e-6, 1e6), st.floats(1.1, 1e6), st.integers(2, 20))
def test_a_range_is_even_in_logarithms(low, ratio, count):
    values = read_lambdas(f"{low!r}..{low * ratio!r}:{count}")
    assert (len(values), values[0], values[-1]) == (count, low, low * ratio)
    for n, value in enumerate(values):
        assert math.log(value / low) == pytest.approx(math.log(ratio) * n / (count - 1), abs=1e-3)


def test_knees_by_hand():
    # An elbow in the upper right corner; what lies within does not count.
    assert knee([(0, 1), (0.9, 0.9), (1, 0), (0.5, 0.5)]) == 1
    assert pareto([(0, 1), (0.9, 0.9), (1, 0), (0.5, 0.5)]) == [0, 1, 2]
    # Axes of very different spans count alike.
    assert knee([(80, 97), (86, 93), (86.5, 60), (86.8, 40)]) == 1
    # Of points that are alike the first one stands for all, and one that is as good in one figure only is behind.
    assert pareto([(1, 1), (1, 1), (1, 0), (0, 1)]) == [0]
    for points in ([], [(1, 1)], [(0, 1), (1, 0)], [(0, 1), (0.1, 0.1), (1, 0)], [(0, 1), (0.5, 0.5), (1, 0)]):
        assert knee(points) is None


# Whole numbers, so that scaling by powers of two rounds nothing.
POINTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12)


@given(POINTS, st.integers(-8, 8), st.integers(-8, 8), st.integers(-100, 100), st.integers(-100, 100))
def test_the_knee_does_not_depend_on_units(points, x, y, right, up):
    scaled = [((a + right) * 2.0**x, (b + up) * 2.0**y) for a, b in points]
    assert knee(scaled) == knee(points)
    assert pareto(scaled) == pareto(points)


@given(POINTS)
def test_the_frontier_is_what_nothing_beats(points):
    def beaten(n):
        (a, b) = points[n]
        return any(c >= a and d >= b and (c, d) != (a, b) for c, d in points)

    front = pareto(points)
    assert {points[n] for n in front} == {points[n] for n in range(len(points)) if not beaten(n)}
    assert front == sorted(front, key=lambda n: points[n][0])
    found = knee(points)
    assert found is None or found in front[1:-1]


def rows_of(tmp_path, runs):
    for name, strength, seed, kept, learned in runs:
        after = [recorded_score("mnist", kept), recorded_score("fmnist", learned)]
        anchors = [recorded_anchor(strength=strength)]
        outcome = outcome_of(read_run(write_run(tmp_path / f"{name}.run", anchors=anchors, after=after)))
        yield Row(name, "mnist", strength, "gradient", seed, "finished", outcome, plain=not strength)


def test_means_over_seeds(tmp_path):
    rows = list(rows_of(tmp_path, [
        ("plain", 0.0, 0, 0.30, 0.88), ("a", 10.0, 0, 0.80, 0.87), ("b", 10.0, 1, 0.90, 0.85),
        ("c", 1e3, 0, 0.97, 0.70),
    ]))  # fmt: skip
    found = trade_off(
        [*rows, Row("d", "mnist", 1e3, "gradient", 1, "failed: NaN"), Row("e", "x", 1.0, "gradient", 0, "waiting")]
    )
    assert [(p.strength, p.finished) for p in found.positions] == [(0, 1), (10, 2), (1e3, 1), (1, 0)]
    assert found.positions[1].retention.mean == pytest.approx(85)
    assert found.positions[1].retention.deviation == pytest.approx(10 / math.sqrt(2))
    assert found.marks == (("on the frontier",), ("knee", "best mean", "on the frontier"), ("on the frontier",), ())
    assert found.headers()[1] == "seeds"
    lines = found.lines()
    assert lines[1] == ["mnist", "2", "10", "85.0% ± 7.1", "86.0% ± 1.4", "85.5%", "knee, best mean, on the frontier"]
    assert lines[2][-1] == "on the frontier, 1 of 2 failed"
    assert lines[3][3:6] == [NOTHING] * 3
    document = found.to_json()
    assert document["knee"] == {"anchors": "mnist", "penalty_form": "gradient", "lambda": 10.0}
    assert document["points"][1]["retention"] == 0.85
    found.draw(tmp_path / "f.png", "$x$")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_perplexities_fall(tmp_path):
    rows = []
    for strength, kept, learned in ((0.0, 108.0, 60.0), (30.0, 55.0, 63.0), (1e3, 50.0, 120.0)):
        path = write_language_model(tmp_path, f"{strength}.run", strength, kept, learned)
        rows.append(Row(str(strength), "code", strength, "gradient", 0, "finished", outcome_of(read_run(path))))
    found = trade_off(rows)
    assert found.positions[found.knee].strength == 30
    assert found.positions[1].mean == pytest.approx(math.sqrt(55 * 63))
    assert found.marks[1] == ("knee", "best mean", "on the frontier")
    found.draw(tmp_path / "f.svg", "prose")


# ---- the verb


def test_a_sweep(job, tmp_path):
    model, anchor, options = job
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    notes = Notes()
    done = swept(job, tmp_path / "s", seeds=[0, 1], progress=notes)
    assert names(tmp_path / "s") == sorted(
        ["plain", "plain-seed-1"] + [f"anchor-data-lambda-{x}{seed}" for x in (1, 100) for seed in ("", "-seed-1")]
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [(p.strength, p.finished) for p in done.tradeoff.positions] == [(0, 2), (1, 2), (100, 2)]
    assert "6 runs: 6 to make, 0 to go on with, 0 done" in notes.lines
    # A run is what finetune makes of the same options.
    again = trained(Small(), torch.float32)
    again.load_state_dict(before)
    only = {name: value for name, value in options.items() if name != "lambdas"}
    alone = ewc.finetune(again, blobs(2, shift=1), anchors=anchor, lambdas=100, seed=1, **only)
    row = next(row for row in done.tradeoff.rows if row.name == "anchor-data-lambda-100-seed-1")
    assert row.outcome.run.document["after"] == [vars(score) for score in alone.after]
    saved = torch.load(tmp_path / "s" / "anchor-data-lambda-100-seed-1.pt", weights_only=True)
    assert all(torch.equal(saved[name], tensor) for name, tensor in again.state_dict().items())
    # The document and the table say the same.
    document = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert document == json.loads(json.dumps(done.document))
    assert (document["status"], document["new"], document["old"]) == ("finished", "new", ["old"])
    table = table_of(tmp_path / "s")
    assert [line["run"] for line in table] == [run["run"] for run in document["runs"]]
    assert float(table[0]["retention"]) == pytest.approx(document["runs"][0]["after"]["old"])
    assert float(table[0]["accuracy on new after"]) == pytest.approx(float(table[0]["plasticity"]))
    assert (tmp_path / "s" / "frontier.png").exists()


def test_called_again(job, tmp_path):
    folder = tmp_path / "s"
    first = swept(job, folder)
    made = {name: (folder / f"{name}.run" / "run.json").read_bytes() for name in names(folder)}
    notes = Notes()
    assert swept(job, folder, progress=notes).document == first.document
    assert "3 runs: 0 to make, 0 to go on with, 3 done" in notes.lines
    # More lambdas are added, and those that were there count with them.
    more = swept(job, folder, lambdas=[10, 100, 100.0], plain=False, progress=notes)
    assert "2 runs: 1 to make, 0 to go on with, 1 done" in notes.lines
    assert [p.strength for p in more.tradeoff.positions] == [0, 1, 10, 100]
    assert all((folder / f"{name}.run" / "run.json").read_bytes() == text for name, text in made.items())
    # Other options are refused wherever they differ, and replaced if that is asked for.
    for changes in ({"epochs": 2}, {"epochs": 2, "lambdas": [7]}):
        with pytest.raises(UsageError, match=r"made with other options: .*epochs was 1, is 2.*--overwrite"):
            swept(job, folder, **changes)
    with pytest.raises(UsageError, match="the size of the data was 60, is 30"):
        swept(job, folder, blobs(2, 30, shift=1))
    assert names(folder) == sorted([*made, "anchor-data-lambda-10"])
    done = swept(job, folder, epochs=2, lambdas=[7], overwrite=True, progress=notes)
    # Those that nobody asked to be made again stay, and have no part in the table.
    assert names(folder) == sorted([*made, "anchor-data-lambda-10", "anchor-data-lambda-7"])
    assert [p.strength for p in done.tradeoff.positions] == [0, 7]
    assert any(note.startswith("left out, for they were made with other options: ") for note in notes.lines)
    # A checkpoint that is gone is made again, and somebody else's file is not written over.
    (folder / "anchor-data-lambda-7.pt").unlink()
    swept(job, folder, epochs=2, lambdas=[7])
    assert (folder / "anchor-data-lambda-7.pt").exists()
    (folder / "anchor-data-lambda-8.pt").write_text("somebody else's")
    with pytest.raises(StorageError, match=r"lambda-8\.pt exists, and is of no run of this sweep"):
        swept(job, folder, epochs=2, lambdas=[8])


def test_nothing_is_discarded_where_what_counts_is_gone(job, tmp_path):
    folder, notes = tmp_path / "s", Notes()
    swept(job, folder, discard=True)
    for path in folder.glob("*.pt"):
        path.unlink()
    swept(job, folder, lambdas=[1, 100], discard=True, progress=notes)
    assert "are gone already; without --discard the sweep makes them again" in notes.lines[-1]


def test_fresh_weights_of_several_seeds(tmp_path):
    """Each seed has weights of its own, and called again they are the same."""
    architecture = "mlp?in_features=4&hidden=8&num_classes=3"
    anchor = ewc.consolidate(ewc.finetune(architecture, blobs(0), epochs=1, eval_on=[]).model, blobs(0))
    anchor.save(tmp_path / "a.safetensors")
    notes = Notes()
    for _ in range(2):
        ewc.sweep(
            architecture, blobs(2, shift=1), anchors=tmp_path / "a.safetensors", lambdas=[1], seeds=[0, 1], epochs=1,
            eval_on={"old": blobs(1), "new": blobs(3, shift=1)}, output=tmp_path / "s", progress=notes,
        )  # fmt: skip
    assert "4 runs: 0 to make, 0 to go on with, 4 done" in notes.lines


def test_stopped_and_killed_runs_go_on(job, tmp_path, monkeypatch):
    whole = swept(job, tmp_path / "whole", epochs=3)
    steps = []
    step = torch.optim.Adam.step

    def interrupted(self, *arguments, **more):
        steps.append(1)
        if len(steps) == 3 + 9 + 5:  # in the second run, after its first epoch
            raise KeyboardInterrupt
        return step(self, *arguments, **more)

    monkeypatch.setattr(torch.optim.Adam, "step", interrupted)
    notes = Notes()
    with pytest.raises(KeyboardInterrupt):
        swept(job, tmp_path / "s", epochs=3, progress=notes)
    assert "the same command again goes on with it" in notes.lines[-1]
    document = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert document["status"] == "interrupted"
    assert [run["status"] for run in document["runs"]] == ["finished", "waiting", "waiting"]
    (tmp_path / "s" / "anchor-data-lambda-100.run").mkdir()  # killed before it said anything
    swept(job, tmp_path / "s", epochs=3, progress=notes)
    assert "3 runs: 1 to make, 1 to go on with, 1 done" in notes.lines
    for point in whole.tradeoff.rows:
        one, other = (tmp_path / folder / f"{point.name}.pt" for folder in ("s", "whole"))
        assert one.read_bytes() == other.read_bytes()


def test_a_run_that_fails_does_not_end_the_others(job, tmp_path):
    changes = {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0, "epochs": 8}
    done = swept(job, tmp_path / "s", lambdas=[1e30], **changes)
    row = next(row for row in done.tradeoff.rows if row.strength)
    assert row.status.startswith("failed: ")
    assert done.tradeoff.lines()[-1][-1] == "1 of 1 failed"
    table = table_of(tmp_path / "s")
    assert table[-1]["status"] == row.status
    assert table[-1]["retention"] == ""
    with pytest.raises(EwcError, match="of 1 run of the sweep .* all failed; the first one: "):
        swept(job, tmp_path / "t", lambdas=[1e30], plain=False, **changes)


def test_all_but_the_knee_is_discarded(job, tmp_path):
    notes = Notes()
    done = swept(job, tmp_path / "s", seeds=[0, 1], discard=True, progress=notes)
    kept = {path.name.removesuffix(".pt") for path in (tmp_path / "s").glob("*.pt")}
    best = next(n for mark in ("knee", "best mean") for n, marks in enumerate(done.tradeoff.marks) if mark in marks)
    assert kept == {row.name for row in done.tradeoff.positions[best].rows}
    assert len(names(tmp_path / "s")) == 6
    # What was discarded is not made again.
    swept(job, tmp_path / "s", seeds=[0, 1], discard=True, progress=notes)
    assert "6 runs: 0 to make, 0 to go on with, 6 done" in notes.lines


def test_stacks_forms_and_probes(job, tmp_path):
    model, _, _ = job
    files = []
    for curvature in ("diagonal", "kfac"):
        anchor = ewc.consolidate(model, blobs(0), curvature=curvature, probe=10)
        files.append(anchor.save(tmp_path / f"{curvature}.anchor.safetensors").path)
    done = swept(
        job, tmp_path / "s", anchors=[files[0], files[1], files, files[0]], lambdas=[3],
        eval_on={"new": blobs(1, shift=1)}, penalty_forms=["gradient", "proximal"],
    )  # fmt: skip
    stems = ("diagonal-lambda-3", "kfac-lambda-3", "diagonal+kfac-lambda-3")
    assert names(tmp_path / "s") == sorted(["plain", *stems, *(f"{stem}-proximal" for stem in stems)])
    assert done.document["retention_of"] == "probes answered as before, %"
    assert all(0 <= point["retention"] <= 1 for point in done.document["points"])
    assert {line[0] for line in done.tradeoff.lines()} >= {"plain", "kfac, proximal", "diagonal+kfac, gradient"}


def test_all_runs_beside_rehearsal_are_measured_by_the_same_inputs(job, tmp_path):
    model, _, _ = job
    probed = ewc.consolidate(model, blobs(0), probe=80)
    lambdas = [0, 1, 100]
    done = swept(job, tmp_path / "s", anchors=probed, lambdas=lambdas, rehearse=["probes", blobs(0)], rehearse_batch=8)
    runs = {
        name: json.loads((tmp_path / "s" / f"{name}.run" / "run.json").read_text()) for name in names(tmp_path / "s")
    }
    # Held by rehearsal alone, without a penalty, is no plain run.
    assert [(p.plain, p.strength, p.finished) for p in done.tradeoff.positions] == [
        (True, 0, 1), (False, 0, 1), (False, 1, 1), (False, 100, 1),
    ]  # fmt: skip
    assert [line[1] for line in done.tradeoff.lines()] == ["-", "0", "1", "100"]
    assert len(runs) == 4
    assert {kept["samples"] for run in runs.values() for kept in run["retention"]} == {16}
    held_out = [run["found"]["rehearsed"][0]["held_out"] for run in runs.values()]
    assert held_out[0] == held_out[1] == held_out[2]
    plain = runs.pop("plain")
    assert plain["options"]["rehearse-weight"] == 0
    assert [memory["samples"] for memory in plain["found"]["rehearsed"]] == [0]
    assert not outcome_of(read_run(tmp_path / "s" / "plain.run")).rehearsed
    assert all(outcome_of(read_run(tmp_path / "s" / f"{name}.run")).rehearsed for name in runs)


def test_a_dry_run_writes_nothing(job, tmp_path):
    model, anchor, options = job
    found = ewc.dry_run(ewc.sweep, model, blobs(2, shift=1), anchors=anchor, output=tmp_path / "s", **options)
    assert found.work == {"runs": 3, "steps": 9}
    assert found.seconds > 0
    assert {path.name for path in found.files} >= {"plain.pt", "plain.run", "anchor-data-lambda-100.run", "sweep.csv"}
    assert list(tmp_path.iterdir()) == []
    swept(job, tmp_path / "s", lambdas=[1])
    found = ewc.dry_run(ewc.sweep, model, blobs(2, shift=1), anchors=anchor, output=tmp_path / "s", **options)
    assert found.work == {"runs": 1, "steps": 3}


def test_what_is_no_sweep(job, tmp_path):
    other = ewc.consolidate(torch.nn.Linear(4, 3), blobs(0), name="other")
    for changes, message in (
        ({"lambdas": "auto"}, "a sweep takes a list of numbers"),
        ({"lambdas": []}, "has no lambda"),
        ({"lambdas": [-1]}, "lambda is -1"),
        ({"lambdas": [math.nan]}, "lambda is nan"),
        ({"penalty_forms": ["magic"]}, "penalty form is 'magic'"),
        ({"seeds": []}, "has no seed"),
        ({"jobs": 0}, "jobs is 0"),
        ({"anchors": []}, "there is none; name them with --anchors"),
        ({"eval_on": {"new": blobs(1)}}, "no old domain is scored and anchors have no probe"),
        ({"eval_on": []}, "the new domain is not scored"),
        ({"epochs": -1}, "epochs is -1"),
        ({"anchors": [job[1], ewc.consolidate(job[0], blobs(0))]}, "would have the same names"),
        ({"anchors": ["a/x.anchor.safetensors", "b/x.pt"]}, "would have the same names"),
    ):
        with pytest.raises(EwcError, match=message):
            swept(job, tmp_path / "s", **changes)
    with pytest.raises(EwcError, match="other.*(first|last|weight)"):
        swept(job, tmp_path / "s", anchors=[job[1], [other]], lambdas=[1])
    with pytest.raises(StorageError, match="does not exist. Make it first"):
        swept(job, tmp_path / "none" / "s")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="it is a file"):
        swept(job, tmp_path / "file")
    with pytest.raises(StorageError, match="holds something, and no sweep"):
        swept(job, tmp_path)


def test_two_sweeps_in_one_folder(job, tmp_path):
    import fcntl

    swept(job, tmp_path / "s")
    handle = os.open(tmp_path / "s", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match="is being made by another process"):
        swept(job, tmp_path / "s")
    os.close(handle)


# ---- the command line


@pytest.fixture
def digits(ewc_ft):
    ewc_ft("finetune", "--model", "mlp?hidden=16", "--data", OLD, "-o", "m.pt", "--epochs", 4, "--lr", 1e-2)
    ewc_ft("consolidate", "m.pt", "--data", OLD)
    return ewc_ft


def test_the_command_line(digits, tmp_path):
    options = ("sweep", "--anchors", "m.anchor.safetensors", "--data", NEW, *EVAL, "--epochs", 1, "--lr", 1e-2)
    assert "runs           4" in digits(*options, "--lambda", "1..100:3", "--dry-run").stderr
    result = digits(*options, "--lambda", "1..100:3", "--lambda", "10,100", "--json")
    document = json.loads(result.stdout)
    folder = tmp_path / "m-digits-rotate-90-limit-300.sweep"
    assert document["sweep"] == folder.name
    assert [point["lambda"] for point in document["points"]] == [0, 1, 10, 100]
    assert "plasticity" in result.stderr
    assert "best mean" in result.stderr
    page = json.loads(digits("report", folder.name, "--json").stdout)
    assert len(page["runs"]) == 4
    # The options of one of its runs start another sweep.
    run = f"{folder.name}/m-lambda-10.run"
    again = digits("sweep", "--config", run, "--no-plain", "-o", "again.sweep", "--json")
    assert [point["lambda"] for point in json.loads(again.stdout)["points"]] == [10]
    assert (tmp_path / "again.sweep" / "m-lambda-10.pt").read_bytes() == (folder / "m-lambda-10.pt").read_bytes()
    for wrong, message in (
        (("--lambda", "auto"), "a sweep tries the values"),
        (("--lambda", "1..10"), "how many values"),
        (("--seed", "1..0"), "empty"),
        (("--penalty-form", "magic"), "magic"),
        (("--jobs", 0), "jobs"),
    ):
        assert message in digits(*options, *wrong, expect=2).stderr
    assert "there is none" in digits("sweep", "--data", NEW, expect=2).stderr
    assert "gone.safetensors" in digits("sweep", "--anchors", "gone.safetensors", "--data", NEW, expect=1).stderr


def command(*arguments):
    return [sys.executable, "-m", "ewc_finetune", "sweep", *map(str, arguments)]


def started(tmp_path, *arguments):
    """Start a sweep of two processes, and wait until both are training; return it and their ids."""
    process = subprocess.Popen(command(*arguments), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    for _ in range(2400):
        if len(list(tmp_path.glob("s.sweep/*.run/state.pt"))) >= 2:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            return process, [c for c in children if b"workers import work" in Path(f"/proc/{c}/cmdline").read_bytes()]
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.kill()
    raise AssertionError("no run has begun")


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="children are looked up in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_jobs_end_with_the_sweep_and_go_on(digits, tmp_path, how):
    options = ("--anchors", "m.anchor.safetensors", "--data", NEW, *EVAL, "--lambda", "10,100", "--no-plain")
    options += ("--lr", 1e-2, "--jobs", 2, "-o", "s.sweep")
    process, children = started(tmp_path, *options, "--epochs", 100_000)
    assert len(children) == 2
    process.send_signal(how)
    _, told = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[how]
    for _ in range(100):
        if all(map(gone, children)):
            break
        time.sleep(0.1)
    assert all(map(gone, children))
    if how != signal.SIGKILL:
        assert "Traceback" not in told
        assert "the same command again goes on with it" in told
        assert json.loads((tmp_path / "s.sweep" / "sweep.json").read_text())["status"] == "interrupted"
    assert not list(tmp_path.glob("s.sweep/*.tmp"))
    again = digits("sweep", *options, "--epochs", 100_000, "--dry-run")
    assert "2 runs: 0 to make, 2 to go on with, 0 done" in again.stderr
    for run in tmp_path.glob("s.sweep/*.run"):
        document = json.loads((run / "run.json").read_text())
        assert document["status"] == ("running" if how == signal.SIGKILL else "interrupted")


@pytest.mark.slow
def test_jobs_give_the_same_bytes(digits, tmp_path):
    """With one thread each, processes of their own and this one round alike."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    options = ("sweep", "--anchors", "m.anchor.safetensors", "--data", NEW, *EVAL, "--lambda", "1,100", "--epochs", 2)
    digits(*options, "-o", "one.sweep")
    result = digits(*options, "-o", "two.sweep", "--jobs", 2)
    torch.set_num_threads(threads)
    assert "m-lambda-100: retention" in result.stderr
    for name in ("plain.pt", "m-lambda-1.pt", "m-lambda-100.pt"):
        assert (tmp_path / "one.sweep" / name).read_bytes() == (tmp_path / "two.sweep" / name).read_bytes()


@pytest.mark.slow
def test_what_other_processes_cannot_have(job, tmp_path):
    class Here(torch.nn.Linear):
        pass

    model = Here(4, 3)
    anchor = ewc.consolidate(model, blobs(0))
    _, _, options = job
    with pytest.raises(UsageError, match="leave --jobs at 1"):
        ewc.sweep(model, blobs(2, shift=1), anchors=anchor, output=tmp_path / "s", jobs=2, **options)


def test_a_module_with_a_new_head_goes_on(tmp_path):
    """What a sweep's runs were made from is known before anything is done to the model."""
    model, data = trained(Small(), torch.float32), blobs(0)
    anchor = ewc.consolidate(model, data)
    options = {"anchors": anchor, "lambdas": [1.0], "epochs": 1, "eval_on": {"old": blobs(1), "data": data}}
    for _ in range(2):
        done = ewc.sweep(model, data, output=tmp_path / "s.sweep", head="new", **options)
    assert len(done.tradeoff.outcomes) == 2


def test_options_that_there_were_none_of_are_what_they_are_by_default(tmp_path):
    """A run of an earlier version lacks what was declared since, and is the same run all the same."""
    model, data = trained(Small(), torch.float32), blobs(0)
    anchor = ewc.consolidate(model, data)
    options = {"anchors": anchor, "lambdas": [1.0], "epochs": 1, "eval_on": {"old": blobs(1), "data": data}}
    ewc.sweep(model, data, output=tmp_path / "s.sweep", **options)
    for path in (tmp_path / "s.sweep").glob("*.run/run.json"):
        document = json.loads(path.read_text())
        del document["options"]["label-smoothing"]
        path.write_text(json.dumps(document))
    ewc.sweep(model, data, output=tmp_path / "s.sweep", **options)
    with pytest.raises(UsageError, match="label-smoothing was 0.0, is 0.1"):
        ewc.sweep(model, data, output=tmp_path / "s.sweep", label_smoothing=0.1, **options)
