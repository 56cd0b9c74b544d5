"""Mending: what was forgotten comes back between the anchors, and is measured."""

import copy
import json

import pytest
import torch
from support.domains import OLD, blobs
from support.models import Small
from support.notes import Notes
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune.anchor import describe
from ewc_finetune.checkpoint.open import open_model
from ewc_finetune.checkpoint.summary import inspect_checkpoint
from ewc_finetune.commands import consolidate
from ewc_finetune.curvature.options import ConsolidateOptions
from ewc_finetune.errors import AnchorMismatchError, ArchitectureError, RetentionError, StorageError, UsageError
from ewc_finetune.finetuning.trainer import Trainer
from ewc_finetune.mending import plan as mending_plan
from ewc_finetune.mending import run as mending_run
from ewc_finetune.penalty.merged_model import merged_model
from ewc_finetune.progress import Silent

_INPUTS, _LABELS = blobs(shift=8.0, seed=1).tensors
LOUD = f"{__name__}:Loud"
NEW = TensorDataset(_INPUTS, (_LABELS + 1) % 3)


class Loud(Small):
    """Without dropout, so that it trains well."""

    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Identity()


@pytest.fixture(scope="module")
def start():
    torch.manual_seed(0)
    net = Loud()
    ewc.finetune(net, OLD, epochs=20, lr=1e-2, batch_size=20, eval_on=[], norm_stats="update")
    return net


@pytest.fixture(scope="module", params=["diagonal", "kfac"])
def old(request, start, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "old.safetensors"
    return ewc.consolidate(start, OLD, curvature=request.param, probe=80, name="old", output=path).path


@pytest.fixture(scope="module")
def forgot(start):
    net = copy.deepcopy(start)
    ewc.finetune(net, NEW, epochs=20, lr=1e-2, batch_size=20, eval_on=[])
    return net


def mend(forgot, old, **options):
    options = {"eval_on": {"new": NEW, "old": OLD}, **options}
    return ewc.mend(copy.deepcopy(forgot), NEW, anchors=old, **options)


def accuracy(model, data):
    return ewc.evaluate(model, data)[0].accuracy


def test_what_was_forgotten_comes_back(forgot, start, old):
    done = mend(forgot, old)
    assert accuracy(forgot, OLD) < accuracy(start, OLD) - 0.2
    assert accuracy(done.model, OLD) > accuracy(forgot, OLD) + 0.1
    assert done.taken.kept + done.taken.learned > done.points[-1].kept + done.points[-1].learned
    names = [point.name for point in done.points]
    assert names[:2] == ["0.03 to 1", "0.1 to 1"]
    assert names[-5:] == ["the old weights", "25% of the way", "50% of the way", "75% of the way", "the new weights"]
    first, last = done.points[-5], done.points[-1]
    assert [s.accuracy for s in first.scores] == pytest.approx([accuracy(start, NEW), accuracy(start, OLD)])
    assert [s.accuracy for s in last.scores] == pytest.approx([accuracy(forgot, NEW), accuracy(forgot, OLD)])
    assert first.retention[0].unchanged == 1
    assert done.taken.ratio is not None
    assert json.loads(json.dumps(done.to_json()))["chosen"] == done.taken.name


def test_a_ratio_alone_is_the_centre_of_the_anchors(forgot, old):
    anchor = ewc.Anchor.open(old)
    new = ewc.consolidate(forgot, NEW, curvature=anchor.provenance.curvature)
    done = mend(forgot, old, anchor_of_new=new, ratios=[0.5])
    assert [point.name for point in done.points] == ["0.5 to 1"]
    assert done.why == "the only ratio"
    found = merged_model([anchor, new], [0.5, 1.0], Silent())
    assert found.keys() == dict(done.model.named_parameters()).keys()
    for name, parameter in done.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), found[name])


def test_a_model_that_has_learned_nothing_since_is_refused(start, forgot, old):
    with pytest.raises(AnchorMismatchError, match=r"has the very weights of .*old.*: nothing is forgotten"):
        mend(start, old)
    moved = copy.deepcopy(start)
    next(module for module in moved.modules() if hasattr(module, "running_mean")).running_mean.add_(1.0)
    assert mend(moved, old, ratios=[1.0]).points
    # One of two anchors is of another model, which may well be forgotten.
    other = ewc.consolidate(forgot, NEW, curvature=ewc.Anchor.open(old).provenance.curvature)
    assert mend(start, [other, old], ratios=[1.0]).points


def test_the_smallest_ratio_that_retains(forgot, old):
    done = mend(forgot, old, retain=0.9, ratios=[100.0, 0.001, 1e6])
    kept = [point.retention[0].unchanged for point in done.points if point.ratio is not None]
    assert kept[done.chosen] >= 0.9
    assert all(share < 0.9 for share in kept[: done.chosen])
    net = copy.deepcopy(forgot)
    with pytest.raises(RetentionError, match=r"no ratio keeps 100.0% .*: 1e-06 to 1 keeps .*%, 1e-05 to 1"):
        ewc.mend(net, NEW, anchors=old, eval_on=[OLD], retain=1.0, ratios=[1e-6, 1e-5])
    assert all(p.equal(q) for p, q in zip(net.state_dict().values(), forgot.state_dict().values(), strict=True))


def test_it_writes_a_checkpoint_with_its_lineage_and_a_figure(forgot, old, tmp_path):
    options = {"ratios": [0.3, 1.0], "output": tmp_path / "m.pt", "plot": tmp_path / "m.png"}
    done = mend(forgot, old, **options)
    assert done.output == tmp_path / "m.pt"
    assert (tmp_path / "m.png").stat().st_size > 5_000
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    weights = state.get("state_dict", state)
    assert all(weights[name].equal(p) for name, p in done.model.named_parameters())
    again = ewc.consolidate(tmp_path / "m.pt", OLD, architecture=LOUD)
    assert [entry["name"] for entry in again.provenance.lineage] == ["old"]
    with pytest.raises(StorageError, match="exists"):
        mend(forgot, old, **options)


def test_nothing_to_measure_by(forgot, start, tmp_path):
    bare = ewc.consolidate(start, OLD)
    with pytest.raises(UsageError, match="nothing tells what is kept: the old anchors have no probes"):
        ewc.mend(copy.deepcopy(forgot), NEW, anchors=bare)
    with pytest.raises(UsageError, match="--retain goes by the answers to the probes in the anchors"):
        mend(forgot, bare, retain=0.9)
    with pytest.raises(UsageError, match="there is nothing to mend by"):
        mend(forgot, ())
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="expected a finite number, more than 0"):
            mend(forgot, bare, ratios=wrong)


def test_what_does_not_belong_together_is_said_before_any_work(forgot, start, old, tmp_path, monkeypatch):
    monkeypatch.setattr(mending_run, "places", None)
    stranger, path = Loud(), tmp_path / "new.safetensors"
    kind = ewc.Anchor.open(old).provenance.curvature
    with pytest.raises(AnchorMismatchError, match=r"was not made from the model: its \S+ is another"):
        mend(forgot, old, anchor_of_new=ewc.consolidate(stranger, NEW, curvature=kind))
    new = ewc.consolidate(forgot, NEW, curvature=kind, output=path).path
    other = ewc.consolidate(start, OLD, curvature="diagonal" if kind == "kfac" else "kfac", name="other")
    with pytest.raises(AnchorMismatchError, match="has K-FAC blocks and .* has a diagonal"):
        mend(forgot, [old, other])
    with pytest.raises(StorageError, match="one of the inputs"):
        mend(forgot, old, anchor_of_new=new, output=path, overwrite=True)
    with pytest.raises(StorageError, match="the model and the plot cannot both be"):
        mend(forgot, old, output=tmp_path / "m.png", plot=tmp_path / "m.png")


def test_a_figure_that_cannot_be_drawn_costs_no_model(forgot, old, tmp_path, monkeypatch):
    def fail(*_):
        raise StorageError("no space")

    monkeypatch.setattr(mending_run, "draw_charts", fail)
    notes = Notes()
    done = mend(forgot, old, ratios=1.0, output=tmp_path / "m.pt", plot=tmp_path / "m.png", progress=notes)
    assert done.output.is_file()
    assert notes.about("no space")


def test_statistics_that_moved_are_mixed(start, old):
    """The old weights have the old ones, and answer as they did."""
    net = copy.deepcopy(start)
    ewc.finetune(net, NEW, epochs=20, lr=1e-2, batch_size=20, eval_on=[], norm_stats="update")
    done = mend(net, old, ratios=[1.0, 3.0])
    named = {point.name: point for point in done.points}
    assert named["the old weights"].retention[0].unchanged == 1
    assert named["the new weights"].scores[0].accuracy == accuracy(net, NEW)
    before, after = (dict(model.named_buffers())["norm.running_mean"] for model in (start, net))
    done = mend(net, old, ratios=3.0)
    torch.testing.assert_close(dict(done.model.named_buffers())["norm.running_mean"], 0.75 * before + 0.25 * after)


def test_a_layer_that_the_old_anchor_does_not_know_stays(forgot, old):
    net = copy.deepcopy(forgot)
    net.add_module("unused", torch.nn.Linear(2, 2))
    weight = net.unused.weight.clone()
    done = ewc.mend(net, NEW, anchors=old, eval_on=[NEW, OLD], ratios=[0.3, 1.0])
    assert done.model.unused.weight.equal(weight)


def test_regressions_are_mended_by_the_divergence():
    torch.manual_seed(0)
    inputs = torch.randn(200, 4)
    first, second = (TensorDataset(inputs, inputs @ torch.randn(4, 2)) for _ in range(2))
    net = torch.nn.Linear(4, 2)
    options = {"likelihood": "gaussian", "lr": 1e-1, "batch_size": 50, "eval_on": []}
    ewc.finetune(net, first, epochs=20, **options)
    old = ewc.consolidate(net, first, likelihood="gaussian", probe=64)
    ewc.finetune(net, second, epochs=20, **options)
    with pytest.raises(UsageError, match="regressions have no answers"):
        ewc.mend(net, second, anchors=old, retain=0.9)
    with pytest.raises(UsageError, match="nothing tells what was learned of data: it has no test split, or no labels"):
        ewc.mend(net, second, anchors=old)
    done = ewc.mend(net, second, anchors=old, eval_on=second)
    kept = [point.kept for point in done.points if point.ratio is not None]
    assert kept == sorted(kept)
    assert done.taken.kept == -done.taken.retention[0].divergence


def test_weights_alone_take_an_architecture(forgot, old, tmp_path):
    torch.save(forgot.state_dict(), tmp_path / "bare.pt")
    with pytest.raises(ArchitectureError, match="Name it with --arch"):
        ewc.mend(tmp_path / "bare.pt", NEW, anchors=old)
    done = ewc.mend(tmp_path / "bare.pt", NEW, anchors=old, ratios=[1.0], architecture=LOUD, output=tmp_path / "m.pt")
    assert done.output.is_file()


def test_it_says_things_once(forgot, old):
    notes = Notes()
    mend(forgot, old, ratios=[0.3, 1.0], polish=2, progress=notes)
    assert notes.about("what is kept is measured by 20 of 80 inputs in probes: the others are rehearsed")
    assert len(notes.lines) == len(set(notes.lines))


def test_a_model_that_is_open_is_consolidated_as_its_file_would_be(forgot, old, tmp_path, monkeypatch):
    """It is opened once, and all that is known of it goes into the anchor."""
    ewc.mend(copy.deepcopy(forgot), NEW, anchors=old, ratios=[1.0], output=tmp_path / "m.pt")
    asked = {"samples": 50, "curvature": "kfac"}
    there = consolidate.run(consolidate.plan(ConsolidateOptions(tmp_path / "m.pt", NEW, architecture=LOUD, **asked)))
    loaded = open_model(tmp_path / "m.pt", LOUD)
    opened = consolidate.run(consolidate.plan(ConsolidateOptions(loaded.model, NEW, **asked), loaded))
    assert opened.provenance == there.provenance
    assert opened.provenance.lineage

    opens = []
    monkeypatch.setattr(mending_plan, "open_model", lambda *given, **known: opens.append(given) or loaded)
    monkeypatch.setattr(consolidate, "open_model", None)
    ewc.mend(tmp_path / "m.pt", NEW, anchors=old, ratios=[1.0])
    assert len(opens) == 1


def test_polish_goes_on_from_the_mended_weights(forgot, old, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(mending_run, "draw_charts", lambda path, charts, title: drawn.append((charts, title)))
    files = {"output": tmp_path / "m.pt", "plot": tmp_path / "m.png"}
    done = mend(forgot, old, polish=40, lr=1e-2, **files)
    mended, polished = next(point for point in done.points if point.ratio == done.taken.ratio), done.taken
    assert polished is done.points[-1]
    assert (polished.name, polished.steps, mended.steps) == (f"{mended.name}, polished", 40, 0)
    # On what they are trained on, and on the old inputs that are not: both losses and the answers' divergence.
    losses, before = (sum(score.loss for score in point.scores) for point in (polished, mended))
    assert losses < before
    assert polished.kept + polished.learned >= mended.kept + mended.learned
    assert [s.accuracy for s in polished.scores] == [accuracy(done.model, NEW), accuracy(done.model, OLD)]
    # A quarter of the probe is never rehearsed, and is all that is measured by, before and after.
    assert {kept.samples for point in done.points for kept in point.retention} == {20}
    assert done.why.endswith("; then 40 steps of training with rehearsal")
    assert json.loads(json.dumps(done.to_json()))["points"][-1]["steps"] == 40
    (((chart,), title),) = drawn
    assert title == "Between old and new, and polished"
    curve = chart.curves[1]
    assert (curve.name, curve.labels, curve.points) == ("polished", ["40 steps"], [(polished.learned, polished.kept)])
    assert chart.chosen == (polished.learned, polished.kept)
    assert chart.x.limits[1] == chart.y.limits[1] == 1
    assert len(chart.curves[0].points) == 6
    again = ewc.consolidate(tmp_path / "m.pt", OLD, architecture=LOUD)
    assert [(entry["name"], entry["polished"]) for entry in again.provenance.lineage] == [("old", 40)]
    how = f"old, mended at {polished.ratio:g}, steps of polish 40, SHA-256 "
    assert describe.ancestor(again.provenance.lineage[0]).startswith(how)
    assert dict(inspect_checkpoint(tmp_path / "m.pt").facts)["lineage"].startswith(how)
    assert all(p.requires_grad and p.grad is None for p in done.model.parameters())


@pytest.mark.parametrize("batches", [1, 3])
def test_polish_takes_as_many_steps_of_a_loader(forgot, old, batches):
    inputs, labels = NEW.tensors
    loader = [(inputs[n::batches], labels[n::batches]) for n in range(batches)]
    done = ewc.mend(copy.deepcopy(forgot), loader, anchors=old, eval_on=[OLD], ratios=[1.0], polish=7)
    assert done.taken.steps == 7


def test_polish_rehearses_data_where_there_is_no_probe(forgot, start):
    bare = ewc.consolidate(start, OLD, samples=100)
    options = {"ratios": [0.3], "polish": 40, "lr": 1e-2}
    done = mend(forgot, bare, rehearse=[TensorDataset(OLD.tensors[0])], **options)
    assert done.taken.kept > done.points[0].kept + 0.02
    with pytest.raises(UsageError, match="there is no probe to rehearse in the anchors: .* --rehearse DATA"):
        mend(forgot, bare, progress=Busy(), **options)


class Busy(Notes):
    """Work has begun where a bar is shown."""

    def bar(self, title, total, unit):
        raise AssertionError(f"{title} has begun")


def test_what_cannot_be_polished_is_said_before_any_work(forgot, start, old):
    small = ewc.consolidate(start, OLD, probe=20)
    with pytest.raises(UsageError, match="has 20 inputs, of which 16 must stay to measure with"):
        mend(forgot, small, polish=1, progress=Busy())
    with pytest.raises(UsageError, match="has no labels, and polish trains on them; leave --polish out"):
        ewc.mend(copy.deepcopy(forgot), TensorDataset(NEW.tensors[0]), anchors=old, polish=1, progress=Busy())
    with pytest.raises(UsageError, match="lr is -1"):
        mend(forgot, old, polish=1, lr=-1, progress=Busy())
    for wrong in (0, 1.5, True):
        with pytest.raises(UsageError, match=f"polish is {wrong}; expected a whole number, at least 1"):
            mend(forgot, old, polish=wrong, progress=Busy())
    notes = Notes()
    mend(forgot, old, ratios=[1.0], rehearse=["probes"], lr=0.1, progress=notes)
    assert notes.about("--rehearse does nothing: it is for --polish")
    assert notes.about("--lr does nothing: it is for --polish")


def test_an_interrupted_polish_leaves_everything_as_it_was(forgot, old, tmp_path, monkeypatch):
    taken = []

    def interrupt(self, group, step=Trainer._step):
        step(self, group)
        taken.append(1)
        if len(taken) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_step", interrupt)
    net = copy.deepcopy(forgot)
    files = {"output": tmp_path / "m.pt", "plot": tmp_path / "m.png"}
    with pytest.raises(KeyboardInterrupt):
        ewc.mend(net, NEW, anchors=old, eval_on=[OLD], ratios=[1.0], polish=9, **files)
    assert len(taken) == 3
    assert all(p.equal(q) for p, q in zip(net.state_dict().values(), forgot.state_dict().values(), strict=True))
    assert not list(tmp_path.iterdir())


def test_polish_that_loses_what_must_be_kept_is_refused(forgot, old):
    net = copy.deepcopy(forgot)
    options = {"ratios": [100.0], "retain": 0.9, "polish": 60, "lr": 0.5}
    with pytest.raises(RetentionError, match="60 steps of polish leave .* and 90.0% are to be kept"):
        ewc.mend(net, NEW, anchors=old, eval_on=[OLD], rehearse=[TensorDataset(NEW.tensors[0])], **options)
    assert all(p.equal(q) for p, q in zip(net.state_dict().values(), forgot.state_dict().values(), strict=True))
