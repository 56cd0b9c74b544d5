"""The verbs from Python, on any module and any data."""

import copy
import dataclasses
import inspect
import json

import numpy as np
import pytest
import torch
from support.domains import NEW, OLD, blobs
from support.models import Small, trained
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ewc_finetune as ewc
from ewc_finetune.anchor.compatibility import remarks
from ewc_finetune.checkpoint.builtin_models import MLP
from ewc_finetune.errors import (
    AnchorError,
    ArchitectureError,
    CheckpointError,
    DataError,
    DeviceError,
    NonFiniteError,
    StorageError,
    UsageError,
)
from ewc_finetune.likelihood.registry import get_likelihood


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = MLP(4, 16, 3)
    ewc.finetune(model, OLD, norm_stats="update", epochs=20, lr=0.01, eval_on=[])
    return model


@pytest.fixture
def anchor(model):
    return ewc.consolidate(model, OLD)


def test_the_readme_in_three_lines(model):
    plain = copy.deepcopy(model)
    anchor = ewc.consolidate(model, OLD, name="old")
    done = ewc.finetune(model, NEW, anchors=anchor, lambdas=100, epochs=20, lr=0.01, eval_on=[OLD, NEW])
    assert done.model is model
    ewc.finetune(plain, NEW, epochs=20, lr=0.01)
    (kept,), (lost,) = ewc.evaluate(model, OLD), ewc.evaluate(plain, OLD)
    assert kept.loss < lost.loss
    assert [round(s.accuracy, 6) for s in done.after] == [
        round(ewc.evaluate(model, d)[0].accuracy, 6) for d in (OLD, NEW)
    ]
    assert done.before[1].accuracy < done.after[1].accuracy


def test_an_anchor_knows_where_it_comes_from(model, tmp_path):
    anchor = ewc.consolidate(
        model,
        OLD,
        name="old",
        estimator="sampled",
        samples=50,
        seed=3,
        exclude=["body.norm*"],
        output=tmp_path / "a.safetensors",
    )
    origin = ewc.Anchor.load(tmp_path / "a.safetensors").provenance
    assert (origin.name, origin.estimator, origin.samples, origin.seed) == ("old", "sampled", 50, 3)
    assert set(origin.excluded) == {"body.norm1.weight", "body.norm1.bias"}
    assert origin.excluded["body.norm1.bias"] == "--exclude body.norm*"
    assert origin.normalisation == {"statistics": "frozen", "layers": ["body.norm1"]}
    assert 0 < origin.scores["accuracy"] <= 1
    assert set(anchor.fisher) == {n for n, _ in model.named_parameters()} - set(origin.excluded)
    assert set(anchor.weights) == {n for n, _ in model.named_parameters()}
    assert set(anchor.buffers) == {n for n, _ in model.named_buffers()}


def test_no_clock_goes_into_an_anchor_but_source_date_epoch(model, monkeypatch):
    assert ewc.consolidate(model, OLD).provenance.created is None
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert ewc.consolidate(model, OLD).provenance.created == "1970-01-01T00:00:00+00:00"


def test_a_subset_is_seeded_and_random(model):
    one, same, other = (ewc.consolidate(model, OLD, samples=30, seed=s) for s in (1, 1, 2))
    assert one.provenance.data["fingerprint"] == same.provenance.data["fingerprint"]
    assert one.provenance.data["fingerprint"] != other.provenance.data["fingerprint"]
    assert all(torch.equal(one.fisher[n], same.fisher[n]) for n in one.fisher)
    everything = ewc.consolidate(model, OLD, samples=10**6)
    assert everything.provenance.samples == 120


@pytest.mark.parametrize("samples", [None, 50])
def test_a_loader_gives_the_fisher_of_its_samples(model, samples):
    by_loader = ewc.consolidate(model, DataLoader(OLD, batch_size=16), samples=samples)
    first = TensorDataset(*(t[:samples] for t in OLD.tensors))
    directly = ewc.consolidate(model, first)
    assert by_loader.provenance.samples == (samples or 120)
    assert by_loader.provenance.data["fingerprint"] == directly.provenance.data["fingerprint"]
    for name in directly.fisher:
        torch.testing.assert_close(by_loader.fisher[name], directly.fisher[name], rtol=1e-5, atol=1e-10)


def test_consolidating_leaves_a_module_as_it_was(model):
    model.train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    anchor = ewc.consolidate(model, OLD)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert model.training
    with torch.no_grad():
        model.head.weight.add_(1)
    assert torch.equal(anchor.weights["head.weight"], before["head.weight"])


def test_frozen_statistics_stay_and_updated_ones_move(model, anchor):
    statistics = {n: b.clone() for n, b in model.named_buffers()}
    frozen = ewc.finetune(copy.deepcopy(model), NEW, anchors=anchor, epochs=1)
    assert frozen.norm_stats == "frozen"
    assert all(torch.equal(statistics[n], b) for n, b in frozen.model.named_buffers())
    moved = ewc.finetune(copy.deepcopy(model), NEW, anchors=anchor, epochs=1, norm_stats="update")
    assert not torch.equal(moved.model.body.norm1.running_mean, statistics["body.norm1.running_mean"])


def test_fresh_weights_update_their_statistics(tmp_path):
    done = ewc.finetune("mlp", "digits?limit=200", epochs=1, output=tmp_path / "m.pt")
    assert done.norm_stats == "update"
    assert done.model.body.norm1.num_batches_tracked == 2


def test_a_last_batch_of_one_sample_does_not_stop_batch_norm(model):
    odd = TensorDataset(*(t[:41] for t in NEW.tensors))
    assert ewc.finetune(copy.deepcopy(model), odd, norm_stats="update", epochs=1, batch_size=20).steps == 2
    assert ewc.finetune(copy.deepcopy(model), odd, norm_stats="frozen", epochs=1, batch_size=20).steps == 3


def test_zero_epochs_change_nothing(model, anchor, tmp_path):
    before = {n: t.clone() for n, t in model.state_dict().items()}
    done = ewc.finetune(model, NEW, anchors=anchor, epochs=0, eval_on=[OLD], output=tmp_path / "m.pt")
    assert done.steps == 0
    assert done.before == done.after
    assert all(torch.equal(before[n], t) for n, t in torch.load(tmp_path / "m.pt", weights_only=True).items())


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(model, anchor):
    net = nn.Sequential(model, nn.Dropout(0.5))
    runs = [ewc.finetune(copy.deepcopy(net), NEW, epochs=2, seed=s).model for s in (1, 1, 2)]
    weights = [torch.cat([p.flatten() for p in run.parameters()]) for run in runs]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_training_leaves_the_callers_random_state(model):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    ewc.finetune(model, NEW, epochs=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_lambda_holds(model, anchor):
    def distance(strength):
        moved = ewc.finetune(copy.deepcopy(model), NEW, anchors=anchor, lambdas=strength, epochs=5, lr=0.01).model
        return sum(
            (anchor.fisher[n] * (p.detach() - anchor.weights[n]) ** 2).sum().item() for n, p in moved.named_parameters()
        )

    distances = [distance(s) for s in (0, 1, 100, 10_000)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.01 * distances[0]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_two_anchors_pull_together_whatever_the_optimizer(model, anchor, optimizer):
    second = ewc.consolidate(ewc.finetune(copy.deepcopy(model), NEW, epochs=2, lr=0.01).model, NEW, name="new")
    done = ewc.finetune(
        copy.deepcopy(model),
        blobs(-3.0, 2),
        anchors=[anchor, second],
        lambdas=[10.0, 20.0],
        epochs=1,
        optimizer=optimizer,
        lr=1e-3,
    )
    assert all(line["penalty"] > 0 for line in done.history if "penalty" in line)


def test_history_and_run_folder(model, anchor, tmp_path):
    done = ewc.finetune(
        model,
        NEW,
        anchors=anchor,
        epochs=3,
        batch_size=20,
        log_every=4,
        eval_on=[OLD],
        output=tmp_path / "m.pt",
        architecture="x:Y",
    )
    lines = [json.loads(line) for line in (done.run / "metrics.jsonl").read_text().splitlines()]
    assert lines == done.history
    assert [line["step"] for line in lines if "loss" in line] == [1, 4, 6, 8, 12, 16, 18]
    assert [line["epoch"] for line in lines if "scores" in line] == [0, 1, 2, 3]
    run = json.loads((done.run / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["steps"] == done.steps == 18
    assert run["options"]["anchors"] == [anchor.label]
    assert run["found"]["anchors"][0]["lambda"] == 100.0
    assert run["found"]["norm_stats"] == "frozen"
    assert run["versions"]["torch"] == torch.__version__
    assert (done.run / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in done.run.iterdir()) == ["figure.png", "metrics.jsonl", "run.json", "run.toml"]


def test_lineage_is_handed_on(model, anchor, tmp_path):
    anchor = anchor.save(tmp_path / "a.safetensors")
    done = ewc.finetune(
        model,
        NEW,
        anchors=anchor,
        lambdas=7,
        epochs=1,
        output=tmp_path / "m.pt",
        architecture="mlp?in_features=4&hidden=16&num_classes=3",
    )
    second = ewc.consolidate(done.output, NEW)
    (entry,) = second.provenance.lineage
    assert entry == {"name": anchor.provenance.name, "sha256": anchor.digest, "lambda": 7.0}
    notes = []

    class Notes(ewc.progress.Silent):
        note = notes.append

    ewc.finetune(
        done.output, OLD, anchors=[anchor, second.save(tmp_path / "b.safetensors")], epochs=0, progress=Notes()
    )
    assert any("counts twice in part" in note for note in notes)


def test_a_loss_of_nan_names_the_step_and_keeps_the_last_good_state(model, anchor, tmp_path):
    inputs, labels = (t.clone() for t in NEW.tensors)

    class Poisoned:
        """The second epoch, which is the third reading, meets a NaN."""

        reads = 0

        def __iter__(self):
            self.reads += 1
            for start in range(0, 120, 40):
                x = inputs[start : start + 40].clone()
                if self.reads >= 3 and start == 40:
                    x[0, 0] = float("nan")
                yield x, labels[start : start + 40]

    with pytest.raises(NonFiniteError, match="the loss is nan at step 5"):
        ewc.finetune(model, Poisoned(), anchors=anchor, epochs=3, output=tmp_path / "m.pt")
    assert not (tmp_path / "m.pt").exists()
    assert all(p.isfinite().all() for p in model.parameters())
    kept = torch.load(tmp_path / "m.run" / "last.pt", weights_only=True)
    assert all(torch.equal(kept[n], t) for n, t in model.state_dict().items())
    assert all(t.isfinite().all() for t in kept.values() if t.is_floating_point())
    assert json.loads((tmp_path / "m.run" / "run.json").read_text())["status"].startswith("failed: the loss is nan")


def test_weights_that_explode_are_caught(model, tmp_path):
    with pytest.raises(NonFiniteError, match="step"):
        ewc.finetune(model, NEW, epochs=3, optimizer="sgd", lr=1e30, output=tmp_path / "m.pt")
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_never_lost(model, anchor, tmp_path):
    anchor.save(tmp_path / "a.safetensors")
    for run in (
        lambda **k: ewc.finetune(model, NEW, epochs=0, output=tmp_path / "m.pt", **k),
        lambda **k: ewc.consolidate(model, OLD, output=tmp_path / "c.safetensors", **k),
    ):
        run()
        with pytest.raises(StorageError, match="exists"):
            run()
        run(overwrite=True)
    (tmp_path / "m.pt").unlink()
    with pytest.raises(StorageError, match=r"run folder .*m\.run exists \(status: finished\)"):
        ewc.finetune(model, NEW, epochs=0, output=tmp_path / "m.pt")
    with pytest.raises(StorageError, match="one of the inputs; it would be lost"):
        ewc.finetune(model, NEW, anchors=tmp_path / "a.safetensors", output=tmp_path / "a.safetensors", overwrite=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lambdas": -1.0}, UsageError, "lambda is -1.0"),
        ({"lambdas": [1.0, 2.0]}, UsageError, "2 lambdas for 1 anchor;"),
        ({"epochs": -1}, UsageError, "epochs is -1"),
        ({"lr": float("nan")}, UsageError, "lr is nan"),
        ({"lr": 0.0}, UsageError, "lr is 0"),
        ({"batch_size": 0}, UsageError, "batch size is 0"),
        ({"momentum": 1.0}, UsageError, "momentum is 1"),
        ({"optimizer": "adm"}, UsageError, "optimizer is 'adm'. Did you mean 'adam'"),
        ({"norm_stats": "fixed"}, UsageError, "norm stats is 'fixed'"),
        ({"device": "cuda"}, DeviceError, "finds no CUDA device"),
        ({"eval_on": ["mnits"]}, UsageError, "Did you mean 'mnist'"),
    ],
)
def test_bad_options(model, anchor, options, error, message):
    if "device" in options and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(error, match=message):
        ewc.finetune(model, NEW, anchors=anchor, **options)


def test_data_that_does_not_suit(model, anchor):
    labels = NEW.tensors[1].clone()
    labels[:5] = 9
    for verb in (ewc.finetune, ewc.consolidate, ewc.evaluate):
        with pytest.raises(DataError, match=r"5 of 120 labels are not among the model's 3 classes \(0 to 2\): found 9"):
            verb(model, TensorDataset(NEW.tensors[0], labels))
        with pytest.raises(DataError, match="does not go into the model"):
            verb(model, TensorDataset(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)))
        with pytest.raises(DataError, match="no samples"):
            verb(model, TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)))
    for verb in (ewc.finetune, ewc.evaluate):
        with pytest.raises(DataError, match="has no labels"):
            verb(model, TensorDataset(NEW.tensors[0]))
    assert ewc.consolidate(model, TensorDataset(OLD.tensors[0])).provenance.scores == {}


def test_an_unknown_estimator_is_not_taken_for_another(model):
    with pytest.raises(UsageError, match="estimator is 'exakt'. Did you mean 'exact'"):
        ewc.consolidate(model, OLD, estimator="exakt")
    with pytest.raises(UsageError, match="estimator is 'exakt'"):
        ewc.compute_fisher(model, [OLD.tensors], get_likelihood("categorical"), "exakt")
    with pytest.raises(UsageError, match="no likelihood is called 'gausian'"):
        ewc.consolidate(model, OLD, likelihood="gausian")


def test_a_shuffling_loader_does_not_move_the_callers_random_state(model):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    loader = DataLoader(OLD, batch_size=16, shuffle=True)
    one, other = ewc.consolidate(model, loader, samples=32), ewc.consolidate(model, loader, samples=32)
    ewc.evaluate(model, loader)
    assert torch.equal(torch.get_rng_state(), state)
    assert one.provenance.data["fingerprint"] == other.provenance.data["fingerprint"]


def test_what_there_is_nothing_to_start_from(tmp_path):
    with pytest.raises(UsageError, match="nothing to start from"):
        ewc.finetune(None, NEW)
    with pytest.raises(CheckpointError, match="there is no checkpoint at nothing.pt, and it names no architecture"):
        ewc.finetune("nothing.pt", NEW)
    with pytest.raises(UsageError, match="is an architecture already"):
        ewc.finetune("mlp", "digits", architecture="mlp")
    with pytest.raises(AnchorError, match="there is no anchor"):
        ewc.finetune(None, NEW, anchors=tmp_path / "none.safetensors")


def test_a_model_that_learns_nothing_gives_no_anchor(model):
    with pytest.raises(AnchorError, match="Fisher is zero everywhere"):
        ewc.consolidate(nn.Sequential(nn.Linear(4, 3), Constant()), OLD)
    with pytest.raises(UsageError, match="no parameter is left"):
        ewc.consolidate(model, OLD, exclude=["*"])
    with pytest.raises(UsageError, match=r"--exclude haed\.\* matches no parameter"):
        ewc.consolidate(model, OLD, exclude=["haed.*"])


class Constant(nn.Module):
    def forward(self, x):
        return 0 * x


def test_an_anchor_of_a_module_without_architecture_says_so(anchor, tmp_path):
    anchor.save(tmp_path / "a.safetensors")
    with pytest.raises(ArchitectureError, match="does not say what architecture"):
        ewc.finetune(None, NEW, anchors=tmp_path / "a.safetensors")
    done = ewc.finetune(
        None,
        NEW,
        anchors=tmp_path / "a.safetensors",
        architecture="mlp?in_features=4&hidden=16&num_classes=3",
        epochs=1,
    )
    assert done.steps == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_learns_as_float32_does(model, tmp_path, dtype):
    narrow = copy.deepcopy(model).to(dtype)
    anchor = ewc.consolidate(narrow, OLD, output=tmp_path / "a.safetensors")
    assert anchor.fisher["head.weight"].dtype == torch.float32
    options = {"anchors": tmp_path / "a.safetensors", "epochs": 5, "lr": 1e-3, "eval_on": [NEW]}
    wide = ewc.finetune(copy.deepcopy(narrow).float(), NEW, **options)
    done = ewc.finetune(narrow, NEW, output=tmp_path / "m.pt", architecture="x:Y", **options)
    assert {p.dtype for p in done.model.parameters()} == {dtype}
    assert done.after[0].loss == pytest.approx(wide.after[0].loss, rel=0.02)
    saved = torch.load(tmp_path / "m.pt", weights_only=True)
    assert all(torch.equal(saved[n], t) and saved[n].dtype == t.dtype for n, t in narrow.state_dict().items())


def test_domains_without_a_name_are_told_apart(model):
    done = ewc.finetune(model, NEW, epochs=1, eval_on=[OLD, NEW])
    assert [s.domain for s in done.after] == ["data 1", "data 2"]
    assert list(done.history[-1]["scores"]) == ["data 1", "data 2"]
    named = ewc.evaluate(model, {"old": OLD, "new": NEW})
    assert [s.domain for s in named] == ["old", "new"]
    assert [s.accuracy for s in named] == [s.accuracy for s in done.after]


def test_scoring_does_not_disturb_training(model):
    class MapStyle(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, i):
            return OLD[i]

    net = nn.Sequential(model, nn.Dropout(0.5))
    quiet, watched = (
        ewc.finetune(copy.deepcopy(net), NEW, epochs=2, eval_on=watch).model for watch in ([], [MapStyle()])
    )
    assert all(torch.equal(a, b) for a, b in zip(quiet.parameters(), watched.parameters(), strict=True))


def test_models_whose_samples_see_each_other_are_refused():
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    with pytest.raises(ArchitectureError, match="change with the other samples of its batch .they differ by"):
        ewc.consolidate(Centred(4, 3), OLD)
    norm = nn.BatchNorm2d(1, track_running_stats=False)
    with pytest.raises(ArchitectureError, match="module 1 normalises with the statistics of the batch"):
        ewc.consolidate(nn.Sequential(nn.Unflatten(1, (1, 2, 2)), norm, nn.Flatten(), nn.Linear(4, 3)), OLD)
    with pytest.raises(
        ArchitectureError, match=r"1: without running statistics, normalisation takes those of the batch"
    ):
        ewc.consolidate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)), OLD)


def test_frozen_parameters_stay_frozen_through_an_anchor(model, tmp_path):
    for p in model.body.parameters():
        p.requires_grad_(False)
    text = "mlp?in_features=4&hidden=16&num_classes=3"
    anchor = ewc.consolidate(model, OLD, architecture=text, output=tmp_path / "a.safetensors")
    assert set(anchor.fisher) == {"head.weight", "head.bias"}
    done = ewc.finetune(None, NEW, anchors=tmp_path / "a.safetensors", epochs=2, lr=0.1)
    for name, p in done.model.named_parameters():
        assert torch.equal(p, anchor.weights[name]) == name.startswith("body.")


def test_labels_of_any_integer_type(model):
    inputs, labels = OLD.tensors
    (wanted,) = ewc.evaluate(model, OLD)
    for dtype in (torch.int32, torch.uint8):
        data = TensorDataset(inputs, labels.to(dtype))
        assert ewc.evaluate(model, data)[0].accuracy == wanted.accuracy
        ewc.consolidate(model, data, estimator="empirical")
        ewc.finetune(copy.deepcopy(model), data, epochs=1)


def test_lineage_in_python(model, anchor):
    done = ewc.finetune(model, NEW, anchors=anchor, epochs=1)
    assert [entry["name"] for entry in done.lineage] == [anchor.provenance.name]
    assert ewc.consolidate(model, NEW, lineage=done.lineage).provenance.lineage == done.lineage


def test_statistics_that_overflow_are_caught(model, tmp_path):
    huge = TensorDataset(NEW.tensors[0] * 1e25, NEW.tensors[1])
    with pytest.raises(NonFiniteError, match="running_var holds NaN or infinity|the loss is"):
        ewc.finetune(model, huge, norm_stats="update", epochs=1, output=tmp_path / "m.pt")
    assert list(tmp_path.iterdir()) == []


def test_other_classes_are_remarked(tmp_path):
    notes = []

    class Notes(ewc.progress.Silent):
        note = notes.append

    ewc.finetune("mlp?hidden=4", "digits?limit=50", epochs=0, output=tmp_path / "m.pt")
    data = blobs(n=10)
    other = TensorDataset(torch.zeros(10, 1, 8, 8), data.tensors[1])
    other.classes = ["cat", "dog", "cow"]
    ewc.evaluate(tmp_path / "m.pt", other, progress=Notes())
    assert any("its classes are not called what the model's are ('cat' for '0')" in note for note in notes)


def test_classes_that_are_numbered_otherwise_are_refused(tmp_path):
    ewc.finetune("mlp?hidden=4", "digits?limit=50", epochs=0, output=tmp_path / "m.pt")
    data = TensorDataset(torch.zeros(10, 1, 8, 8), torch.zeros(10, dtype=torch.long))
    data.classes = ["1", "2"]
    with pytest.raises(DataError, match="the class '1' is number 0 here and 1 in the model"):
        ewc.evaluate(tmp_path / "m.pt", data)
    data.classes = [str(digit) for digit in range(5)]  # fewer, but numbered alike
    notes = []

    class Notes(ewc.progress.Silent):
        note = notes.append

    ewc.evaluate(tmp_path / "m.pt", data, progress=Notes())
    assert not any("classes" in note for note in notes)


class Reader(nn.Module):
    """Takes its inputs by name, as models of transformers do, and returns more than logits."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, tokens, mask):
        pooled = (self.embed(tokens) * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return {"hidden": pooled, "logits": self.head(pooled)}


def readings(shift=0, n=60):
    generator = torch.Generator().manual_seed(shift)
    labels = torch.randint(0, 2, (n,), generator=generator)
    tokens = torch.randint(0, 3, (n, 5), generator=generator) + 3 * labels[:, None] + shift
    mask = torch.ones(n, 5)
    return [
        {"tokens": t, "mask": m, "labels": y}
        for t, m, y in zip(tokens.split(20), mask.split(20), labels.split(20), strict=True)
    ]


def test_the_whole_job_on_dictionaries():
    torch.manual_seed(0)
    model = Reader()
    ewc.finetune(model, readings(), epochs=30, lr=0.05, eval_on={})
    assert ewc.evaluate(model, readings())[0].accuracy == 1
    anchor = ewc.consolidate(model, readings())
    assert anchor.provenance.input["names"] == {"tokens": [5], "mask": [5]}
    unused = anchor.fisher["embed.weight"][6:]
    assert (unused == 0).all()
    done = ewc.finetune(model, readings(shift=3), anchors=anchor, epochs=3, lr=0.05, eval_on={"old": readings()})
    assert done.after[0].accuracy > 0.8


def test_no_labels_are_needed(model):
    (points, _) = OLD.tensors
    with_labels = ewc.consolidate(model, OLD)
    without = ewc.consolidate(model, TensorDataset(points))
    assert without.provenance.scores == {}
    for name, value in with_labels.fisher.items():
        assert torch.equal(without.fisher[name], value)
    with pytest.raises(DataError, match="the empirical estimator needs labels and this data has none"):
        ewc.consolidate(model, TensorDataset(points), estimator="empirical")
    with pytest.raises(DataError, match="data has no labels, and a score needs them"):
        ewc.evaluate(model, TensorDataset(points))
    with pytest.raises(DataError, match="data has no labels, and fine-tuning needs them"):
        ewc.finetune(model, TensorDataset(points), epochs=1, eval_on={})


def test_samples_auto_stops_at_the_error_that_is_asked_for(model, tmp_path):
    large = blobs(n=6000)
    anchor = ewc.consolidate(model, large, samples="auto", rtol=0.1, output=tmp_path / "a.safetensors")
    assert 200 <= anchor.provenance.samples < 6000
    error = ewc.Anchor.load(tmp_path / "a.safetensors").provenance.standard_error
    assert error["trace"] <= 0.1
    assert set(error["layers"]) == {"body.linear1", "body.norm1", "head"}
    again = ewc.consolidate(model, large, samples="auto", rtol=0.1)
    assert again.provenance.data["fingerprint"] == anchor.provenance.data["fingerprint"]
    ordered = ewc.consolidate(model, large, samples=anchor.provenance.samples)
    assert ordered.provenance.data["fingerprint"] != anchor.provenance.data["fingerprint"]
    for wrong in (
        {"samples": "many"},
        {"samples": 0.5},
        {"samples": True},
        {"draws": 2.5},
        {"draws": 2, "estimator": "exact"},
        {"samples": "auto", "rtol": 0},
        {"samples": "auto", "estimator": "batched"},
    ):
        with pytest.raises(UsageError):
            ewc.consolidate(model, large, **wrong)


def test_regression_from_anchor_to_fine_tune(tmp_path):
    points = OLD.tensors[0]
    old, new = TensorDataset(points, points[:, :2] * 2), TensorDataset(points, points[:, 2:])
    model = nn.Sequential(nn.Linear(4, 2))
    anchor = ewc.consolidate(model, old, likelihood="gaussian", architecture=None)
    # For linear regression the Fisher is the second moment of the inputs, whatever the weights.
    torch.testing.assert_close(anchor.fisher["0.weight"], points.square().mean(0).expand(2, 4), rtol=1e-5, atol=0)
    assert set(anchor.provenance.scores) == {"loss"}
    done = ewc.finetune(model, new, anchors=anchor, epochs=5, lr=0.01, eval_on={"new": new})
    assert done.after[0].accuracy is None
    assert done.after[0].loss < done.before[0].loss
    assert ewc.evaluate(model, old, likelihood="gaussian")[0].accuracy is None


def test_a_checkpoint_that_its_run_did_not_write_is_remarked_on(ewc_ft, tmp_path):
    ewc_ft("finetune", "--model", "mlp?hidden=4", "--data", "digits?limit=40", "--epochs", "1", "--output", "m.pt")
    remark = "m.pt is not what the run m.run wrote: it was changed, replaced or damaged since"
    assert remark not in ewc_ft("evaluate", "m.pt", "--data", "digits?limit=40").stderr
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    next(iter(state.values())).add_(1)
    torch.save(state, tmp_path / "m.pt")
    assert remark in ewc_ft("evaluate", "m.pt", "--data", "digits?limit=40").stderr


def test_an_anchor_that_the_lineage_knows_otherwise_is_remarked_on(tmp_path):
    model = trained(Small(), torch.float32)
    data = TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
    old = ewc.consolidate(model, data, output=tmp_path / "old.safetensors", name="old")
    ewc.finetune(
        model, data, anchors=[old], output=tmp_path / "new.pt", architecture="support.models:Small", eval_on=[]
    )
    new = ewc.consolidate(tmp_path / "new.pt", data, output=tmp_path / "new.safetensors", name="new")
    other = ewc.consolidate(model, data, output=tmp_path / "other.safetensors", name="old", samples=5)
    told = "is not the anchor 'old' that had a part in the weights"
    assert not any(told in text for text in remarks([old, new]))
    assert any(told in text for text in remarks([other, new]))


def test_functions_say_which_options_they_take():
    for function, options in (
        (ewc.finetune, ewc.FinetuneOptions),
        (ewc.consolidate, ewc.ConsolidateOptions),
        (ewc.evaluate, ewc.EvaluateOptions),
        (ewc.merge, ewc.MergeOptions),
        (ewc.sweep, ewc.SweepOptions),
    ):
        parameters = inspect.signature(function).parameters
        assert parameters.keys() == {field.name for field in dataclasses.fields(options)} | {"progress"}
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\) has no argument 'lamda'\. "):
            function("m.pt", "digits", lamda=1) if "data" in parameters else function("a", lamda=1)
    with pytest.raises(TypeError, match="Did you mean 'lambdas'"):
        ewc.dry_run(ewc.finetune, "mlp", "digits", lambda_=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("m.pt",), r"consolidate\(\) is called wrongly: missing a required argument: 'data'"),
        (("m.pt", "digits", 3), r"consolidate\(\) is called wrongly: too many positional arguments"),
    ],
)
def test_a_wrong_call_names_the_function(arguments, message):
    with pytest.raises(TypeError, match=message):
        ewc.consolidate(*arguments)


def test_what_help_says_of_a_function():
    for function in (ewc.finetune, ewc.consolidate, ewc.evaluate, ewc.merge, ewc.sweep, ewc.push, ewc.compute_fisher):
        names = inspect.signature(function).parameters.keys()
        assert function.__annotations__.keys() == names
        text = function.__doc__
        assert text.count("Args:\n") == 1
        assert "    options: " not in text
        missing = {name for name in names if f"\n    {name}: " not in text}
        assert not missing, function.__name__


def test_no_progress_is_none(model):
    anchor = ewc.consolidate(model, OLD, progress=None)
    done = ewc.finetune(model, NEW, anchors=anchor, epochs=1, eval_on=[OLD], progress=None)
    assert done.steps
    assert ewc.evaluate(model, OLD, progress=None)
    assert ewc.merge([anchor, anchor], progress=None)


def test_numbers_of_numpy_are_recorded_as_numbers(model, anchor, tmp_path):
    options = {"batch_size": np.int64(20), "lr": np.float32(0.5), "lambdas": np.float64(3.0), "epochs": 1}
    files = {"anchors": anchor.save(tmp_path / "a.safetensors").path, "output": tmp_path / "m.pt"}
    ewc.finetune(model, NEW, eval_on=[], architecture="x:Y", device=torch.device("cpu"), **files, **options)
    said = json.loads((tmp_path / "m.run" / "run.json").read_text())["options"]
    assert (said["batch-size"], said["lr"], said["lambda"], said["device"]) == (20, 0.5, [3.0], "cpu")


@pytest.mark.parametrize(
    "wrong", [{"optimizer": ["adamw"]}, {"batch_size": [10]}, {"amp": ("x",)}, {"eval_every": [5]}]
)
def test_a_list_is_no_single_value(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong)).replace("_", " ")):
        ewc.finetune(nn.Linear(4, 3), OLD, **wrong)


def test_a_dry_run_refuses_what_the_run_would(tmp_path):
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "m.pt")
    with pytest.raises(UsageError, match="does not come from the Hub"):
        ewc.dry_run(
            ewc.consolidate, tmp_path / "m.pt", OLD, anchor_weights="reference",
            architecture="torch.nn:Linear?in_features=4&out_features=3",
        )  # fmt: skip


def test_an_empty_list_in_a_file_is_no_default(tmp_path, ewc_ft):
    ewc_ft("finetune", "--model", "mlp?hidden=4", "--data", "digits?limit=40", "--epochs", 0, "-o", "m.pt")
    ewc_ft("consolidate", "m.pt", "--data", "digits?limit=40", "-o", "a.safetensors")
    (tmp_path / "c.toml").write_text('lambda = []\nanchors = ["a.safetensors"]\ndata = "digits?limit=40"\n')
    said = ewc_ft("sweep", "--config", "c.toml", "-o", "s.sweep", expect=2).stderr
    assert "the sweep has no lambda; expected at least one" in said
