"""How a fine-tune trains: accumulation, clipping, rates, precision, early stopping, and going on after a stop."""

import dataclasses
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from support.notes import Notes
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ewc_finetune as ewc
from ewc_finetune.checkpoint.formats.state_dict import save_object
from ewc_finetune.data.domain import as_domain
from ewc_finetune.errors import DataError, NonFiniteError, StorageError, UsageError
from ewc_finetune.finetuning.observer import RunObserver
from ewc_finetune.finetuning.schedule import Schedule
from ewc_finetune.runs.folder import RunFolder, lock

MLP = "mlp?in_features=4&hidden=16&num_classes=3&batch_norm=false"


def made(size=90, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())


DATA, SMALL, SCORED = made(90), made(7), {"held out": made(40, seed=1)}


class Dropping(nn.Module):
    """Draws from torch's generator at every step."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x):
        return self.body(x)


class Augmented(Dataset):
    """Draws from torch's generator for every sample."""

    def __len__(self):
        return len(DATA)

    def __getitem__(self, n):
        x, y = DATA[n]
        return x + 0.1 * torch.randn(4), y


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def model():
    torch.manual_seed(3)
    return Dropping().eval()


def tuned(data=DATA, *, of=None, **options):
    return ewc.finetune(
        of or model(),
        data,
        eval_on=SCORED,
        **{"epochs": 2, "lr": 1e-2, "batch_size": 20, "log_every": 1, **options},
    )


# Steps


def test_accumulated_batches_are_as_one_large_one():
    plain = ewc.finetune(MLP, DATA, lr=1e-2, batch_size=30, epochs=2, eval_on=[])
    summed = ewc.finetune(MLP, DATA, lr=1e-2, batch_size=7, epochs=2, accumulate=5, eval_on=[])
    assert (plain.steps, summed.steps) == (6, 6)  # 30 + 30 + 30, and 35 + 35 + 20
    last = ewc.finetune(MLP, DATA, lr=1e-2, batch_size=40, epochs=2, eval_on=[])
    split = ewc.finetune(MLP, DATA, lr=1e-2, batch_size=8, accumulate=5, epochs=2, eval_on=[])  # 10 in the last step
    torch.testing.assert_close(weights(last.model), weights(split.model), rtol=1e-4, atol=1e-6)
    losses = [[line["loss"] for line in done.history if "loss" in line] for done in (last, split)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("form", ["gradient", "proximal"])
def test_the_norm_of_a_step_is_clipped(form):
    start = ewc.finetune(MLP, DATA, epochs=3, lr=1e-2, eval_on=[]).model
    anchor = ewc.consolidate(start, DATA)
    found = []
    for clip in (None, 1e-3):
        before = weights(start)
        copy = ewc.finetune(MLP, DATA, epochs=0, eval_on=[]).model
        copy.load_state_dict(start.state_dict())
        with torch.no_grad():
            for p in copy.parameters():
                p.add_(0.5)  # so that the penalty pulls as well
        moved = weights(copy)
        done = ewc.finetune(
            copy, SMALL, anchors=anchor, lambdas=1e3, penalty_form=form, optimizer="sgd", momentum=0.0, lr=1.0,
            clip=clip, epochs=1, eval_on=[],
        )  # fmt: skip
        found.append((weights(done.model) - moved).norm().item())
        assert torch.equal(before, weights(start))
    assert found[0] > 0.1
    if form == "gradient":  # loss and penalty together
        assert found[1] == pytest.approx(1e-3, rel=1e-2)
    else:  # the implicit step of the penalty is taken after the clipped one
        assert found[1] > 0.1


def test_learning_rates_by_hand():
    schedule = Schedule(lr=1.0, warmup=2, decay="linear")
    assert [schedule.rate(step, 6) for step in range(1, 7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = Schedule(lr=1.0, warmup=0.5, decay="cosine")
    expected = [0.5, 1.0, 1.0, 0.5 * (1 + math.cos(math.pi / 2))]
    assert [cosine.rate(step, 4) for step in range(1, 5)] == pytest.approx(expected)
    assert [Schedule(lr=0.3, warmup=3).rate(step, None) for step in (1, 3, 99)] == pytest.approx([0.1, 0.3, 0.3])
    done = tuned(warmup=2, decay="linear", lr=1.0)
    assert done.steps == 10
    rates = [line["lr"] for line in done.history if "lr" in line]
    assert rates == pytest.approx([0.5, 1.0, *(1 - n / 8 for n in range(8))])


def test_weight_decay_goes_to_the_optimizer():
    plain, decayed = (tuned(optimizer="sgd", momentum=0.0, weight_decay=x, epochs=1) for x in (None, 5.0))
    assert weights(decayed.model).norm() < 0.8 * weights(plain.model).norm()
    torch.testing.assert_close(
        weights(tuned(optimizer="adamw", weight_decay=0.01).model), weights(tuned(optimizer="adamw").model)
    )


def test_frozen_parameters_stay_for_this_run_alone():
    start = model()
    before = {name: p.clone() for name, p in start.named_parameters()}
    done = tuned(of=start, freeze=["body.0.*", "body.4.bias"])
    moved = {name for name, p in done.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"body.1.weight", "body.1.bias", "body.4.weight"}
    assert all(p.requires_grad for p in start.parameters())
    with pytest.raises(UsageError, match=r"--freeze body.9 matches no parameter. .*body.0.bias"):
        tuned(freeze=["body.9"])
    with pytest.raises(UsageError, match="no parameter is left to train"):
        tuned(freeze=["*"])
    assert all(p.requires_grad for p in start.parameters())


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_half_precision_is_near_and_leaves_float32(amp):
    anchor = ewc.consolidate(model(), DATA)
    full, half = (tuned(amp=choice, anchors=anchor, lambdas=10, epochs=4, clip=1.0) for choice in (None, amp))
    assert all(p.dtype == torch.float32 for p in half.model.parameters())
    assert not torch.equal(weights(full.model), weights(half.model))
    assert half.after[0].loss == pytest.approx(full.after[0].loss, rel=0.2)


def test_a_step_that_overflows_is_skipped(monkeypatch):
    start = model()
    before = weights(start)
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda device, enabled: scaler(device, init_scale=1e38, enabled=enabled)
    )
    anchor = ewc.consolidate(start, DATA)
    with pytest.raises(NonFiniteError, match="none of 5 steps was taken, for every gradient overflowed in fp16"):
        tuned(of=start, amp="fp16", epochs=1, anchors=anchor, lambdas=1e6)
    assert torch.equal(before, weights(start))  # five halvings of that scale are not enough
    notes = Notes()
    done = tuned(of=start, amp="fp16", epochs=30, anchors=anchor, lambdas=1e6, progress=notes)
    assert weights(done.model).isfinite().all()
    assert notes.about(" of 150 steps were skipped, for gradients overflowed in fp16")


@pytest.mark.slow
def test_compiled_training_is_the_same():
    plain, compiled = (tuned(DATA, compile=choice, epochs=2, of=Dropping().eval()) for choice in (False, True))
    assert [line["step"] for line in compiled.history] == [line["step"] for line in plain.history]
    assert compiled.after[0].loss < compiled.before[0].loss
    again = ewc.finetune(MLP, DATA, eval_on=[], epochs=2, lr=1e-2)
    fast = ewc.finetune(MLP, DATA, eval_on=[], epochs=2, lr=1e-2, compile=True)
    torch.testing.assert_close(weights(again.model), weights(fast.model), rtol=1e-3, atol=1e-5)
    assert list(fast.model.state_dict()) == list(again.model.state_dict())


# Data


def test_workers_read_the_same_samples():
    class Plain(Dataset):
        def __len__(self):
            return len(DATA)

        def __getitem__(self, n):
            return DATA[n]

    walks = [
        [labels for _, labels in as_domain(Plain()).batches(20, torch.Generator().manual_seed(5), workers=workers)]
        for workers in (0, 2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*walks, strict=True))


@pytest.mark.parametrize("data", [DATA, Augmented()])
def test_batches_that_are_skipped(data):
    walks = []
    for skip in (0, 3):
        torch.manual_seed(0)
        walks.append(list(as_domain(data).batches(20, torch.Generator().manual_seed(5), skip=skip)))
    assert len(walks[0]) == 5
    assert all(torch.equal(a[1], b[1]) for a, b in zip(walks[0][3:], walks[1], strict=True))


def test_a_stream_has_one_reader():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(DATA)

    assert tuned(Stream(), epochs=1).steps == 5
    with pytest.raises(DataError, match="a stream, which only one process can read; leave --workers out"):
        tuned(Stream(), epochs=1, workers=2)
    with pytest.raises(UsageError, match="doesn't say how many batches it has"):
        tuned(Stream(), epochs=1, decay="cosine")
    assert tuned(Stream(), epochs=1, warmup=3).steps == 5


# Evaluation, and the best state


def test_evaluation_every_few_steps():
    done = tuned(eval_every=4, log_every=3)
    assert [line["step"] for line in done.history if "scores" in line] == [0, 4, 8, 10]
    assert [line["step"] for line in done.history if "loss" in line] == [1, 3, 4, 5, 6, 8, 9, 10]
    assert [line["step"] for line in tuned(eval_every=5).history if "scores" in line] == [0, 5, 10]


def test_the_best_state_is_kept_and_the_last_one_beside_it(tmp_path):
    # A rate at which it soon gets worse.
    options = {"lr": 0.5, "epochs": 12, "eval_every": 3, "select_on": [as_domain(SCORED["held out"], "held out")]}
    done = tuned(keep="best", output=tmp_path / "m.pt", architecture="x:Y", **options)
    merits = {line["step"]: line["scores"]["held out"]["accuracy"] for line in done.history if "scores" in line}
    assert done.step == max(merits, key=merits.get) < done.steps
    assert done.after[0].accuracy == max(merits.values())
    kept, last = (torch.load(path, weights_only=True) for path in (tmp_path / "m.pt", done.run / "last.pt"))
    assert all(torch.equal(kept[name], value) for name, value in done.model.state_dict().items())
    plain = tuned(**options)
    assert all(torch.equal(last[name], value) for name, value in plain.model.state_dict().items())
    assert not (done.run / "best.pt").exists()
    # The same without files, and with early stopping.
    assert torch.equal(weights(tuned(keep="best", **options).model), weights(done.model))
    early = tuned(patience=2, **options)
    stale = sum(step > early.step for step in [line["step"] for line in early.history if "scores" in line])
    assert stale == 2
    assert early.steps == early.step + 6


def test_nothing_says_which_state_is_best():
    with pytest.raises(UsageError, match="--select-on"):
        tuned(patience=1)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"accumulate": 0}, "accumulate is 0; expected a whole number, at least 1"),
        ({"epochs": 1.5}, "epochs is 1.5; expected a whole number"),
        ({"eval_every": 0}, "eval every is 0"),
        ({"clip": 0}, "clip is 0; expected a finite number above 0"),
        ({"warmup": -1}, "warmup is -1; expected a finite number, 0 or above"),
        ({"warmup": 1.5}, "warmup is 1.5; expected a share below 1, or a whole number of steps"),
        ({"weight_decay": math.nan}, "weight decay is nan"),
        ({"decay": "cosin"}, "decay is 'cosin'. Did you mean 'cosine'?"),
        ({"amp": "bf61"}, "amp is 'bf61'. Did you mean 'bf16'?"),
        ({"keep": "bst"}, "keep is 'bst'. Did you mean 'best'?"),
    ],
)
def test_wrong_options(option, message):
    with pytest.raises(UsageError) as refused:
        tuned(**option)
    assert str(refused.value).startswith(message)


def test_an_option_that_is_none():
    with pytest.raises(TypeError, match="no argument 'epoch'. Did you mean 'epochs'"):
        ewc.finetune(MLP, DATA, epoch=3)


# Going on


class Killed(BaseException):
    """Stands for SIGKILL: nothing is done after it."""


@pytest.fixture
def killing(monkeypatch):
    """Have a run end at its n-th line of the log, as if the process were gone."""

    def at(n):
        log, lines = RunObserver.log, [0]

        def counting(self, line):
            log(self, line)
            lines[0] += 1
            if lines[0] == n:
                folder = self.checkpoints.folder
                folder.stop = lambda status: folder._metrics.close()
                raise Killed

        monkeypatch.setattr(RunObserver, "log", counting)
        return lambda: monkeypatch.setattr(RunObserver, "log", log)

    return at


def outcome(folder):
    """What must be the same to the byte."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (folder / "m.pt", folder / "m.run" / "metrics.jsonl", folder / "m.run" / "run.toml")
    }


HARD = {
    "plain": {},
    "steps": {"eval_every": 3, "accumulate": 2, "clip": 1.0, "warmup": 0.2, "decay": "cosine"},
    "updating": {"norm_stats": "update", "optimizer": "sgd", "eval_every": 2},
    "half": {"amp": "fp16", "eval_every": 2},
    "best": {"keep": "best", "lr": 1.0, "select_on": [as_domain(SCORED["held out"], "held out")]},
    "rehearsing": {"rehearse": ["probes", DATA], "rehearse_batch": 7, "eval_every": 2},
    "early": {"patience": 1, "lr": 0.3, "eval_every": 2, "select_on": [as_domain(SCORED["held out"], "held out")]},
}


@pytest.mark.parametrize("kind", ["memory", "augmented", "loader"])
@pytest.mark.parametrize("options", HARD.values(), ids=HARD)
def test_a_run_that_goes_on_ends_with_the_same_bytes(options, kind, tmp_path, monkeypatch, killing):
    data = {"memory": DATA, "augmented": Augmented(), "loader": DataLoader(Augmented(), 20, shuffle=True)}[kind]
    anchor = ewc.consolidate(model(), DATA, probe=40).save(tmp_path / "a.safetensors").path

    def run(folder, **more):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        return tuned(data, anchors=anchor, output="m.pt", architecture="x:Y", **{**options, **more})

    run(tmp_path / "whole")
    whole = outcome(tmp_path / "whole")
    lines = len((tmp_path / "whole" / "m.run" / "metrics.jsonl").read_text().splitlines())
    for at in range(2, lines + 1, 3):
        folder = tmp_path / f"{at}"
        undo = killing(at)
        with pytest.raises(Killed):
            run(folder)
        undo()
        assert not (folder / "m.pt").exists()
        done = run(folder, resume="m.run")
        assert outcome(folder) == whole
        assert len(done.history) == lines
        assert [score.domain for score in done.before] == ["held out"]
    assert sorted(path.name for path in (folder / "m.run").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole" / "m.run").iterdir()
    )


@pytest.mark.parametrize("form", ["gradient", "proximal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_blocks_and_half_precision(form, dtype, tmp_path, monkeypatch, killing):
    anchors = [ewc.consolidate(model().to(dtype), made(60, seed), curvature="kfac") for seed in (3, 4)]
    anchors = [anchor.save(tmp_path / f"{n}.safetensors").path for n, anchor in enumerate(anchors)]

    def run(folder, **more):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        return tuned(
            of=model().to(dtype), anchors=anchors, penalty_form=form, output="m.pt", architecture="x:Y", **more
        )

    run(tmp_path / "whole")
    undo = killing(9)
    with pytest.raises(Killed):
        run(tmp_path / "cut")
    undo()
    run(tmp_path / "cut", resume="m.run")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_run_without_a_state_says_that_it_starts_over(tmp_path, monkeypatch, killing):
    monkeypatch.chdir(tmp_path)
    undo, notes = killing(3), Notes()
    with pytest.raises(Killed):
        tuned(output="m.pt", architecture="x:Y")
    undo()
    (tmp_path / "m.run" / "state.pt").unlink(missing_ok=True)
    tuned(output="m.pt", architecture="x:Y", resume="m.run", progress=notes)
    assert notes.about("m.run has no state of its training to go on from: it starts at its first step")


def test_what_may_have_changed_since(tmp_path, monkeypatch, killing):
    monkeypatch.chdir(tmp_path)
    notes = Notes()

    def run(**more):
        return tuned(output="m.pt", architecture="x:Y", progress=notes, **more)

    undo = killing(8)
    with pytest.raises(Killed):
        run()
    undo()
    with pytest.raises(UsageError, match=r"cannot go on with other options: lr was 0.01, is 0.5; seed was 0, is 1\."):
        run(resume="m.run", lr=0.5, seed=1)
    with pytest.raises(UsageError, match=r"files have changed: the size of the data was 90, is 60; the digest"):
        run(resume="m.run", data=made(60))
    assert (tmp_path / "m.run" / "state.pt").exists()
    done = run(resume="m.run", epochs=3, log_every=2)
    assert done.steps == 15
    assert "going on with another option: epochs was 2, is 3" in notes.lines
    assert "going on after step 5" in notes.lines
    with pytest.raises(StorageError, match="is finished; start another one from its checkpoint"):
        run(resume="m.run", epochs=3, log_every=2)
    with pytest.raises(StorageError, match="no run folder: there is no run.json in it"):
        run(resume=tmp_path)


def test_versions_and_damage(tmp_path, monkeypatch, killing):
    monkeypatch.chdir(tmp_path)
    undo = killing(8)
    with pytest.raises(Killed):
        tuned(output="m.pt", architecture="x:Y")
    undo()
    run, state = tmp_path / "m.run" / "run.json", tmp_path / "m.run" / "state.pt"
    whole, document = state.read_bytes(), json.loads(run.read_text())
    for versions, message in (
        ({"ewc_finetune": "0.0.0"}, r"started by ewc-finetune 0\.0\.0, and this is"),
        ({"torch": "1.0"}, None),
    ):
        run.write_text(json.dumps({**document, "versions": {**document["versions"], **versions}}))
        if message:
            with pytest.raises(UsageError, match=message):
                tuned(output="m.pt", architecture="x:Y", resume="m.run")
    for damage in (b"", whole[:100], b"x" * 100):
        state.write_bytes(damage)
        with pytest.raises(StorageError, match=r"state\.pt cannot be read .*; start the run again"):
            tuned(output="m.pt", architecture="x:Y", resume="m.run")
        assert run.exists()
    state.write_bytes(whole)
    with (tmp_path / "m.run" / "metrics.jsonl").open("ab") as log:
        log.write(b'{"step": 9, "lo')
    assert tuned(output="m.pt", architecture="x:Y", resume="m.run").steps == 10
    assert all(json.loads(line) for line in (tmp_path / "m.run" / "metrics.jsonl").read_text().splitlines())


def test_every_option_is_recorded():
    from ewc_finetune.finetuning.options import FinetuneOptions
    from ewc_finetune.finetuning.request import asked

    known = asked(FinetuneOptions(None, None))
    assert {field.name.replace("_", "-") for field in dataclasses.fields(Schedule)} <= known.keys()
    assert {"lambda", "eval", "arch", "anchors", "select-on", "freeze"} <= known.keys()


COMMAND = [
    "finetune", "--anchors", "model.anchor.safetensors", "--data", "digits?rotate=90", "--epochs", "6", "--log-every",
    "1", "--eval-every", "5", "--output", "m.pt", "--lr", "1e-3",
]  # fmt: skip


@pytest.mark.slow
def test_sigkill_at_any_moment(ewc_ft, tmp_path):
    ewc_ft("finetune", "--model", "mlp?hidden=16", "--data", "digits", "-o", "model.pt", "--epochs", 2)
    ewc_ft("consolidate", "model.pt", "--data", "digits", "--samples", 100)

    printed = tmp_path / "printed.txt"

    def start(*arguments):
        with printed.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "ewc_finetune", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    whole = start(*COMMAND)
    assert whole.wait() == 0
    (tmp_path / "whole").mkdir()
    (tmp_path / "m.pt").rename(tmp_path / "whole" / "m.pt")
    (tmp_path / "m.run").rename(tmp_path / "whole" / "m.run")
    metrics = tmp_path / "m.run" / "metrics.jsonl"
    process, kills = start(*COMMAND), 0
    for size in (1, 500, 3000, 6000, 12_000, 16_000):
        while process.poll() is None and (not metrics.exists() or metrics.stat().st_size < size):
            time.sleep(0.002)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        lines = metrics.read_bytes()
        assert lines.endswith(b"\n") or not lines
        for line in lines.splitlines():
            json.loads(line)
        process = start("finetune", "--resume", "m.run")
    assert process.wait() == 0, printed.read_text()
    assert kills >= 3
    assert outcome(tmp_path) == outcome(tmp_path / "whole")


def test_half_a_line_is_none(tmp_path):
    """A write that the disk has no room for takes part of a line only."""
    folder = RunFolder.create(tmp_path / "m.run", False, {}, None)
    folder.log({"step": 1})

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, text):
            return self.file.write(text[:5])

        def __getattr__(self, name):
            return getattr(self.file, name)

    folder._metrics = Full(folder._metrics)
    with pytest.raises(StorageError, match="the disk is full"):
        folder.log({"step": 2})
    assert (tmp_path / "m.run" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    folder.stop("failed")
    assert not (tmp_path / "m.run").exists()


def test_two_at_once_do_not_write_one_run(tmp_path, monkeypatch, killing):
    monkeypatch.chdir(tmp_path)
    undo = killing(8)
    with pytest.raises(Killed):
        tuned(output="m.pt", architecture="x:Y")
    undo()
    with RunFolder.reopen(tmp_path / "m.run"), pytest.raises(StorageError, match="is being written by another process"):
        tuned(output="m.pt", architecture="x:Y", resume="m.run")


def test_a_run_folder_that_cannot_be_made_takes_nothing_away(tmp_path, monkeypatch):
    tuned(output=tmp_path / "m.pt", architecture="x:Y")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m.run").iterdir()}
    monkeypatch.setattr("ewc_finetune.runs.folder.to_toml", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tuned(output=tmp_path / "m.pt", architecture="x:Y", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m.run").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt", "m.run"]


@pytest.fixture
def stopped(tmp_path, monkeypatch, killing):
    """A run that was killed in its second epoch, in a folder of its own."""
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    undo = killing(8)
    with pytest.raises(Killed):
        tuned(output="m.pt", architecture="x:Y", keep="best", **SELECTING)
    undo()
    return tmp_path / "a" / "m.run"


SELECTING = {"select_on": [as_domain(SCORED["held out"], "held out")]}


def going_on(folder, **more):
    return tuned(resume=folder, architecture="x:Y", **{"keep": "best", **SELECTING, **more})


def test_from_another_folder(stopped, tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    (tmp_path / "b" / "m.pt").write_text("somebody else's")
    done = going_on("../a/m.run")
    assert done.output.resolve() == tmp_path / "a" / "m.pt"
    assert (tmp_path / "b" / "m.pt").read_text() == "somebody else's"


def test_another_output_or_name_is_refused(stopped, tmp_path):
    (tmp_path / "precious.pt").write_text("precious")
    with pytest.raises(UsageError, match="goes on to its own output"):
        going_on(stopped, output=tmp_path / "precious.pt")
    assert (tmp_path / "precious.pt").read_text() == "precious"
    renamed = stopped.rename(stopped.with_name("n.run"))
    with pytest.raises(UsageError, match="was called otherwise for its output m.pt"):
        going_on(renamed)


def test_a_whole_folder_may_move(stopped, tmp_path):
    stopped.parent.rename(tmp_path / "moved")
    assert going_on(tmp_path / "moved" / "m.run").output.resolve() == tmp_path / "moved" / "m.pt"


@pytest.mark.parametrize("name", ["best-5.pt", "metrics.jsonl"])
def test_what_is_gone_from_the_folder(stopped, name):
    path = stopped / name
    path.write_bytes(path.read_bytes()[:20]) if path.suffix == ".jsonl" else path.unlink()
    with pytest.raises(StorageError, match=r"is shorter than it was|the best state of the run, is gone"):
        going_on(stopped)
    assert (stopped / "state.pt").exists()


def test_the_best_state_is_the_one_that_the_state_names(stopped):
    """A run may be killed when a better one is written already, and the state is not."""
    (stopped / "best-10.pt").write_bytes(b"of a step that has not been yet")
    done = going_on(stopped)
    assert not list(stopped.glob("best-*"))
    kept = torch.load(done.output, weights_only=True)
    assert all(torch.equal(kept[name], value) for name, value in done.model.state_dict().items())


def test_a_killed_process_leaves_nothing_for_ever(stopped):
    (stopped / ".ewc-ft-0123abcd.tmp").mkdir()
    going_on(stopped)
    assert sorted(path.name for path in stopped.iterdir()) in (
        ["figure.png", "metrics.jsonl", "run.json", "run.toml"],
        ["figure.png", "last.pt", "metrics.jsonl", "run.json", "run.toml"],
    )


def test_killed_when_it_was_all_but_done(stopped):
    state = (stopped / "state.pt").read_bytes()
    going_on(stopped)
    (stopped / "state.pt").write_bytes(state)
    with pytest.raises(StorageError, match="is finished"):
        going_on(stopped)
    assert not (stopped / "state.pt").exists()


def test_fewer_epochs_than_are_done(stopped):
    with pytest.raises(UsageError, match="the run is in epoch 1 already, and --epochs is 0"):
        going_on(stopped, epochs=0)


def test_what_a_run_was_told_later_is_recorded(stopped):
    going_on(stopped, epochs=3)
    document = json.loads((stopped / "run.json").read_text())
    assert document["options"]["epochs"] == 3
    assert "epochs = 3" in (stopped / "run.toml").read_text()
    assert document["status"] == "finished"


def test_other_data_to_score_and_another_module(stopped):
    with pytest.raises(UsageError, match="the digest of held out, which is scored"):
        ewc.finetune(
            model(), DATA, eval_on={"held out": made(40, seed=9)}, keep="best", resume=stopped, architecture="x:Y",
            epochs=2, lr=1e-2, batch_size=20, log_every=1, select_on=[as_domain(SCORED["held out"], "held out")],
        )  # fmt: skip
    other = model()
    other.body[2] = nn.Tanh()
    with pytest.raises(UsageError, match="the model's digest"):
        going_on(stopped, of=other)


def test_a_dry_run_is_of_whole_runs(stopped):
    before = {path.name: path.stat().st_mtime_ns for path in stopped.iterdir()}
    with pytest.raises(UsageError, match="--dry-run is of whole runs"):
        ewc.dry_run(ewc.finetune, model(), DATA, resume=stopped, eval_on=SCORED, epochs=2, lr=1e-2, batch_size=20)
    assert {path.name: path.stat().st_mtime_ns for path in stopped.iterdir()} == before


def test_what_happens_after_the_end_takes_nothing_away(tmp_path, monkeypatch):
    finish = RunFolder.finish

    def interrupted(self, **results):
        finish(self, **results)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuned(output=tmp_path / "m.pt", architecture="x:Y")
    assert json.loads((tmp_path / "m.run" / "run.json").read_text())["status"] == "finished"


def test_a_run_under_way_is_not_replaced(tmp_path):
    tuned(output=tmp_path / "m.pt", architecture="x:Y")
    with (tmp_path / "m.run" / "metrics.jsonl").open("ab") as held:
        assert lock(held)
        with pytest.raises(StorageError, match="is being written by another process"):
            tuned(output=tmp_path / "m.pt", architecture="x:Y", overwrite=True)
    tuned(output=tmp_path / "m.pt", architecture="x:Y", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt", "m.run"]


def test_a_disk_that_is_full_when_the_state_is_written(tmp_path, monkeypatch):
    def full(temporary, path, saved):
        if path.name == "state.pt":
            raise OSError(28, "No space left on device")
        return save(temporary, path, saved)

    save = save_object
    monkeypatch.setattr("ewc_finetune.runs.folder.save_object", full)
    with pytest.raises(StorageError, match=r"state\.pt: the disk is full"):
        tuned(output=tmp_path / "m.pt", architecture="x:Y")
    assert torch.load(tmp_path / "m.run" / "last.pt", weights_only=True)


def test_names_that_are_alike(tmp_path):
    """Two domains that are called alike stay two, in the scores, the log and the choice."""
    upside_down = TensorDataset(SCORED["held out"].tensors[0], 2 - SCORED["held out"].tensors[1])
    done = ewc.finetune(
        model(), DATA, eval_on=[upside_down], select_on=[SCORED["held out"]], keep="best", epochs=4, lr=1e-2
    )
    assert [score.domain for score in done.after] == ["data 1", "data 1 (2)"]
    by_right = {line["step"]: line["scores"]["data 1 (2)"]["accuracy"] for line in done.history if "scores" in line}
    assert by_right[done.step] == max(by_right.values())
    twice = ewc.finetune("mlp?hidden=8", "digits?limit=40", eval_on=["digits", "digits"], epochs=0)
    assert [score.domain for score in twice.before] == ["digits", "digits (2)"]


def test_the_new_domain_by_any_name():
    scored = {"new?": "digits", "old?x": "digits?rotate=90"}
    done = ewc.finetune("mlp?hidden=8", "digits?limit=40", eval_on=scored, keep="best", epochs=3, lr=1e-2)
    assert done.step > 0


def test_data_is_not_walked_through_to_say_what_it_is(tmp_path):
    class Endless(Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, n):
            return DATA[n % 90]

    done = tuned(of=model(), output=tmp_path / "m.pt", architecture="x:Y", epochs=1)
    assert json.loads((done.run / "run.json").read_text())["command"] is None
    done = ewc.finetune(model(), Endless(), eval_on=Endless(), output=tmp_path / "n.pt", architecture="x:Y", epochs=1)
    assert [score.samples for score in done.after] == [20]


def test_wrong_types():
    for wrong in (
        *({"lr": "0.1"}, {"warmup": "10%"}, {"clip": True}, {"momentum": "x"}, {"compile": "yes"}),
        *({"retain": "x"}, {"tolerance": "x", "lambdas": "auto"}),
    ):
        with pytest.raises(UsageError):
            tuned(**wrong)
    import numpy

    assert tuned(epochs=numpy.int64(1)).steps == 5
