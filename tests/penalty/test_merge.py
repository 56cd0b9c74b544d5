"""Merged anchors: what they pull with, what they are as models, and what is known of them."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.anchors import loop_over_anchors, make_anchor, stacks
from support.files import save_changed
from support.models import Small, trained
from torch import nn

import ewc_finetune as ewc
from ewc_finetune import Anchor, Penalty
from ewc_finetune.anchor.compatibility import remarks
from ewc_finetune.errors import (
    AnchorError,
    AnchorMismatchError,
    ArchitectureError,
    NonFiniteError,
    StorageError,
    UsageError,
)
from ewc_finetune.penalty.quadratic import sum_quadratics
from ewc_finetune.storage.lazy_tensors import TensorFile

IN_ONE_FOLDER = [HealthCheck.function_scoped_fixture]


def saved(tmp_path, model, count, **options):
    return [make_anchor(model, seed, **options).save(tmp_path / f"{seed}.safetensors") for seed in range(count)]


@settings(max_examples=40, deadline=None, suppress_health_check=IN_ONE_FOLDER)
@given(stack=stacks, split=st.integers(0, 4), factor=st.floats(0.1, 10))
def test_merged_stacked_and_looped_agree(tmp_path_factory, stack, split, factor):
    """In any grouping: some anchors merged into files, the merged stacked with the rest."""
    folder = tmp_path_factory.mktemp("merged")
    model = trained(Small(), torch.float32)
    anchors = [make_anchor(model, seed, zeros=zeros, missing=missing) for seed, zeros, missing, _ in stack]
    lambdas = [lam for *_, lam in stack]
    useful = [any(f.any() for f in a.fisher.values()) and lam > 0 for a, lam in zip(anchors, lambdas, strict=True)]
    first, rest = slice(0, split), slice(split, None)
    grouped, strengths = list(anchors[rest]), list(lambdas[rest])
    if any(useful[first]):
        merged = ewc.merge(
            anchors[first], lambdas=[lam / factor for lam in lambdas[first]], output=folder / "m.safetensors"
        )
        grouped, strengths = [folder / "m.safetensors", *grouped], [factor, *strengths]
        assert all(value > 0 for value in merged.provenance.constant.values())
    else:
        grouped, strengths = list(anchors), list(lambdas)
    expected = loop_over_anchors(model, anchors, lambdas)
    penalty = Penalty(model, grouped, strengths)
    assert penalty.value() == pytest.approx(expected.item(), rel=2e-5, abs=1e-12)
    gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    penalty.add_gradient()
    scale = sum(lambdas) or 1.0
    for p, g in zip(model.parameters(), gradients, strict=True):
        found, wanted = (torch.zeros_like(p) if t is None else t for t in (p.grad, g))
        torch.testing.assert_close(found / scale, wanted / scale, rtol=2e-5, atol=6e-6)


def test_files_are_stacked_as_anchors_in_memory_are(tmp_path):
    model = trained(Small(), torch.float32)
    anchors = saved(tmp_path, model, 3, zeros=0.5)
    whole = sum_quadratics([Anchor.load(a.path) for a in anchors], [1.0, 2.0, 3.0])
    lazy = sum_quadratics([Anchor.open(a.path) for a in anchors], [1.0, 2.0, 3.0])
    assert whole.constant == lazy.constant
    assert whole.constant
    for name, curvature in whole.curvature.items():
        assert torch.equal(curvature, lazy.curvature[name])
        assert torch.equal(whole.centre[name], lazy.centre[name])


def test_an_open_anchor_reads_and_checks_what_is_asked_for(tmp_path):
    model = trained(Small(), torch.float32)
    path = make_anchor(model, 0).save(tmp_path / "a.safetensors").path
    tensors = load_file(path)
    anchor = Anchor.open(path)
    assert isinstance(anchor.fisher, TensorFile)
    assert set(anchor.fisher) == {name for name, _ in model.named_parameters()}
    assert torch.equal(anchor.weights["first.weight"], tensors["anchor.first.weight"])
    with pytest.raises(KeyError):
        anchor.fisher["nothing"]
    metadata = {"format": "ewc-anchor", "format_version": "1", "anchor": json.dumps({"name": "x"})}
    for value, error, message in [
        (torch.nan, NonFiniteError, "fisher.first.bias holds NaN or infinity"),
        (-1.0, AnchorError, "fisher.first.bias holds negative values"),
    ]:
        save_changed({**tensors, "fisher.first.bias": torch.full((6,), value)}, tmp_path / "bad.safetensors", metadata)
        opened = Anchor.open(tmp_path / "bad.safetensors")
        assert opened.fisher["last.bias"].shape == (3,)
        with pytest.raises(error, match=message):
            Penalty(model, opened, 1.0)
        with pytest.raises(error, match=message):
            ewc.merge([path, tmp_path / "bad.safetensors"], output=tmp_path / "never.safetensors")
    assert not (tmp_path / "never.safetensors").exists()
    save_changed({**tensors, "anchor.last.bias": torch.full((3,), torch.inf)}, tmp_path / "bad.safetensors", metadata)
    with pytest.raises(NonFiniteError, match=r"anchor\.last\.bias holds NaN or infinity"):
        Penalty(model, tmp_path / "bad.safetensors", 1.0)
    with pytest.raises(AnchorError, match="has changed since it was opened"):
        opened.fisher["last.bias"]
    (tmp_path / "bad.safetensors").unlink()
    with pytest.raises(AnchorError, match="cannot be read"):
        opened.fisher["last.bias"]


def test_the_newest_value_stays_where_nothing_holds():
    """Also that of an anchor whose own curvature leaves this parameter out."""
    model = nn.Linear(2, 2)
    old, new = make_anchor(model, 0, zeros=1.1), make_anchor(model, 1, missing=["weight"])
    centre = sum_quadratics([old, new], [1.0, 1.0]).centre
    assert torch.equal(centre["weight"], new.weights["weight"])
    assert torch.equal(sum_quadratics([old, new], [1.0, 0.0]).centre["weight"], old.weights["weight"])


def test_the_centre_is_the_fisher_weighted_mean(tmp_path):
    model = trained(Small(), torch.float32)
    a, b = make_anchor(model, 0), make_anchor(model, 1)
    merged = ewc.merge([a, b], lambdas=[1.0, 3.0])
    for name, w in merged.weights.items():
        fa, fb = a.fisher[name].double(), 3 * b.fisher[name].double()
        wanted = (fa * a.weights[name] + fb * b.weights[name]) / (fa + fb)
        torch.testing.assert_close(w.double(), wanted, rtol=1e-6, atol=1e-6)


def test_the_online_form_by_hand():
    model = trained(Small(), torch.float32)
    a, b, c = (make_anchor(model, seed) for seed in range(3))
    merged = ewc.merge([a, b, c], lambdas=[1.0, 2.0, 1.0], online=True, gamma=0.5)
    for name in a.fisher:
        wanted = 0.5 * (0.5 * a.fisher[name] + 2 * b.fisher[name]) + c.fisher[name]
        torch.testing.assert_close(merged.fisher[name], wanted)
        assert torch.equal(merged.weights[name], c.weights[name])
    assert merged.provenance.constant == {}
    assert merged.provenance.merged["gamma"] == 0.5
    # One after the other is the same as all at once.
    step = ewc.merge([ewc.merge([a, b], lambdas=[1.0, 2.0], online=True, gamma=0.5), c], online=True, gamma=0.5)
    for name in a.fisher:
        torch.testing.assert_close(step.fisher[name], merged.fisher[name])


def test_lineage_latest_pulls_to_the_newest_weights_an_anchor_had_a_part_in():
    model = trained(Small(), torch.float32)
    part = [{"name": "domain 0", "sha256": "aa", "lambda": 1.0}]
    a = make_anchor(model, 0, digest="aa")
    b = make_anchor(model, 1, digest="bb", lineage=part)
    c = make_anchor(model, 2, digest="cc")
    latest = sum_quadratics([a, b, c], [1.0, 1.0, 1.0], "latest")
    moved = replace(a, weights=b.weights)
    expected = sum_quadratics([moved, b, c], [1.0, 1.0, 1.0])
    for name in latest.centre:
        torch.testing.assert_close(latest.centre[name], expected.centre[name])
        assert torch.equal(latest.curvature[name], expected.curvature[name])
    assert latest.constant == pytest.approx(expected.constant)
    with pytest.raises(UsageError, match="lineage latest needs anchors that are saved"):
        sum_quadratics([make_anchor(model, 0), b], [1.0, 1.0], "latest")
    # Merged weights are the newest that A had a part in only if it had a part in all of them.
    other = make_anchor(model, 3, digest="dd")
    merged = replace(ewc.merge([b, other]), digest="ee")
    apart = sum_quadratics([a, merged], [1.0, 1.0], "latest")
    together = sum_quadratics([a, merged], [1.0, 1.0])
    assert all(torch.equal(apart.centre[name], together.centre[name]) for name in apart.centre)
    assert "comes after it; expected oldest first" in " ".join(remarks([b, a]))
    assert "counts twice in part. --lineage latest" in remarks([a, b])[0]
    assert remarks([a, b], "latest") == []
    with pytest.raises(UsageError, match="lineage is 'newest'"):
        sum_quadratics([a, b], [1.0, 1.0], "newest")


def test_what_counts_twice_or_differs_is_said(tmp_path):
    model = trained(Small(), torch.float32)
    a, b = saved(tmp_path, model, 2)
    both = ewc.merge([a, b], output=tmp_path / "both.safetensors")
    assert f"{both.path} was merged from {a.path}, which so counts twice" in remarks([a, both])[0]
    further = ewc.merge([both, make_anchor(model, 7)], output=tmp_path / "further.safetensors")
    assert "was merged from" in remarks([a, further])[0]
    assert "was merged from anchors that are in" in remarks([both, further])[0]
    other = make_anchor(model, 5, estimator="batched")
    assert "differ in estimator" in remarks([a, other])[0]
    shaped = [make_anchor(model, n, checkpoint={"architecture": f"mlp?hidden={n}"}) for n in (1, 2)]
    assert "differ in architecture" in remarks(shaped)[0]
    with pytest.raises(AnchorMismatchError, match=r"0\.safetensors has the likelihood categorical and .* gaussian"):
        ewc.merge([a, make_anchor(model, 6, likelihood="gaussian")])


def test_provenance_of_all_parents_is_kept(tmp_path):
    model = trained(Small(), torch.float32)
    lineage = [{"name": "older", "sha256": "0" * 64, "lambda": 2.0}]
    a = make_anchor(model, 0, samples=10, lineage=lineage).save(tmp_path / "a.safetensors")
    b = make_anchor(model, 1, samples=5, estimator="sampled", missing=["last.bias"], excluded={"last.bias": "asked"})
    b = b.save(tmp_path / "b.safetensors")
    ewc.merge([a.path, b.path], lambdas=[1.0, 4.0], output=tmp_path / "m.safetensors")
    merged = Anchor.load(tmp_path / "m.safetensors")
    origin = merged.provenance
    assert origin.name == "domain 0+domain 1"
    assert origin.estimator == "mixed"
    assert origin.samples == 15
    assert origin.lineage == lineage
    assert origin.excluded == {}  # the older anchor holds it
    assert [(p["sha256"], p["lambda"]) for p in origin.merged["parents"]] == [(a.digest, 1.0), (b.digest, 4.0)]
    assert origin.merged["parents"][1]["provenance"]["excluded"] == {"last.bias": "asked"}
    assert sum(layer["share"] for layer in origin.importance) == pytest.approx(1)
    again = ewc.merge([merged, a], name="again", output=tmp_path / "n.safetensors")
    found = Anchor.load(again.path).provenance.merged
    assert [p["sha256"] for p in found["parents"]] == [a.digest, b.digest, a.digest]
    assert found["through"] == [merged.digest]


def test_the_merged_centre_is_a_model(tmp_path):
    torch.manual_seed(0)
    architecture = "mlp?in_features=4&num_classes=3&hidden=6"
    data = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.randint(0, 3, (60,)))
    start = ewc.finetune(architecture, data, epochs=1, output=tmp_path / "s.pt")
    ewc.consolidate(start.output, data, output=tmp_path / "a.safetensors", batch_size=30)
    other = ewc.finetune(
        None, data, anchors=tmp_path / "a.safetensors", epochs=1, seed=4, lr=0.1, output=tmp_path / "t.pt"
    )
    ewc.consolidate(other.output, data, output=tmp_path / "b.safetensors", batch_size=30)
    merged = ewc.merge(
        [tmp_path / "a.safetensors", tmp_path / "b.safetensors"],
        output=tmp_path / "m.safetensors",
        checkpoint=tmp_path / "m.pt",
    )
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    newest = Anchor.load(tmp_path / "b.safetensors")
    for name, value in state.items():
        assert torch.equal(value, merged.weights.get(name, newest.buffers.get(name)))
    (score,) = ewc.evaluate(tmp_path / "m.pt", {"data": data})
    assert score.loss > 0
    # What pulled on these weights is known to whoever consolidates them.
    after = ewc.consolidate(tmp_path / "m.pt", data, batch_size=30)
    digests = [Anchor.open(tmp_path / f"{n}.safetensors").digest for n in "ab"]
    assert {entry["sha256"] for entry in after.provenance.lineage} == set(digests)
    with pytest.raises(StorageError, match=r"m\.pt exists"):
        ewc.merge([newest], checkpoint=tmp_path / "m.pt")
    nameless = make_anchor(trained(Small(), torch.float32), 0)
    with pytest.raises(ArchitectureError, match="Name it with --arch"):
        ewc.merge([nameless], checkpoint=tmp_path / "n.pt")


def test_half_precision_parents(tmp_path):
    model = trained(nn.Linear(3, 2), torch.bfloat16)
    a, b = make_anchor(model, 0), make_anchor(model, 1)
    merged = ewc.merge([a, b]).save(tmp_path / "m.safetensors")
    assert merged.weights["weight"].dtype == torch.float32
    expected = loop_over_anchors(model, [a, b], [1.0, 1.0]).item()
    assert Penalty(model, merged, 1.0).value() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0.5}, "gamma belongs to the online form"),
        ({"online": True, "gamma": 1.5}, "gamma is 1.5; expected 0 to 1"),
        ({"online": True, "lineage": "latest"}, "lineage belongs to the offline one"),
        ({"lambdas": 0.0}, "every lambda is 0"),
        ({"lambdas": [1.0, 2.0, 3.0]}, "3 lambdas for 2 anchors"),
    ],
)
def test_options_that_make_no_sense(options, message):
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=message):
        ewc.merge([make_anchor(model, 0), make_anchor(model, 1)], **options)
    with pytest.raises(UsageError, match="nothing to merge"):
        ewc.merge([])


def test_inputs_are_never_overwritten(tmp_path):
    (a,) = saved(tmp_path, nn.Linear(2, 2), 1)
    with pytest.raises(StorageError, match="is one of the inputs"):
        ewc.merge([a.path], output=a.path, overwrite=True)
    with pytest.raises(StorageError, match="cannot both be"):
        ewc.merge([a.path], output=tmp_path / "x", checkpoint=tmp_path / "x")


@pytest.mark.parametrize(
    "failing",
    [
        "storage.lazy_tensors.save_file",
        "storage.lazy_tensors._finish_header",
        "checkpoint.formats.state_dict.torch.save",
    ],
)
def test_an_interrupted_merge_leaves_neither_anchor_nor_checkpoint(tmp_path, monkeypatch, failing):
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    start = ewc.finetune("mlp?in_features=4&num_classes=3&hidden=4", data, epochs=0, output=tmp_path / "m.pt")
    a = ewc.consolidate(start.output, data, output=tmp_path / "a.safetensors").path
    (tmp_path / "model.pt").write_text("earlier")
    before = sorted(tmp_path.iterdir())

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"ewc_finetune.{failing}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ewc.merge(a, output=tmp_path / "c.safetensors", checkpoint=tmp_path / "model.pt", overwrite=True)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "model.pt").read_text() == "earlier"


@pytest.mark.parametrize("earlier", [False, True])
def test_a_merge_whose_second_rename_fails_takes_the_first_back(tmp_path, monkeypatch, earlier):
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    start = ewc.finetune("mlp?in_features=4&num_classes=3&hidden=4", data, epochs=0, output=tmp_path / "m.pt")
    a = ewc.consolidate(start.output, data, output=tmp_path / "a.safetensors").path
    if earlier:
        (tmp_path / "c.safetensors").write_text("earlier")
    before = sorted(tmp_path.iterdir())
    link = os.link

    def interrupted(made, target):
        if target.name == "model.pt":
            assert (tmp_path / "c.safetensors").read_bytes() != b"earlier"
            raise KeyboardInterrupt
        link(made, target)

    monkeypatch.setattr(os, "link", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ewc.merge(a, output=tmp_path / "c.safetensors", checkpoint=tmp_path / "model.pt", overwrite=True)
    assert sorted(tmp_path.iterdir()) == before
    if earlier:
        assert (tmp_path / "c.safetensors").read_text() == "earlier"


def half():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(torch.bfloat16)


def test_the_merged_model_of_half_precision_keeps_its_width(tmp_path):
    model = half().eval()
    anchors = [
        replace(make_anchor(model, seed), buffers={n: b.clone() for n, b in model.named_buffers()}) for seed in (0, 1)
    ]
    ewc.merge(anchors, checkpoint=tmp_path / "m.pt", architecture="test_merge:half")
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    assert {t.dtype for t in state.values() if t.is_floating_point()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "paths", [{"output": "x.pt"}, {"output": "x.safetensors", "checkpoint": "y.safetensors"}], ids=["anchor", "model"]
)
def test_outputs_that_are_named_for_each_other(tmp_path, paths):
    with pytest.raises(UsageError, match="let it end in"):
        ewc.merge(make_anchor(nn.Linear(2, 2), 0), **{option: tmp_path / name for option, name in paths.items()})


def test_lambdas_that_float32_cannot_hold(tmp_path):
    model = nn.Linear(2, 2).double()
    anchors = [make_anchor(model, 0), make_anchor(model, 1)]
    with pytest.raises(NonFiniteError, match="use smaller lambdas"):
        ewc.merge(anchors, lambdas=1e39)
    with pytest.raises(NonFiniteError, match="use larger lambdas"):
        ewc.merge(anchors, lambdas=1e-50, output=tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_models_that_have_nothing_in_common():
    with pytest.raises(AnchorMismatchError, match="have no parameter in common"):
        ewc.merge([make_anchor(nn.Linear(2, 2), 0), make_anchor(Small(), 1)])
    with pytest.raises(AnchorMismatchError, match="If the head was expanded in between, add --head expand"):
        ewc.merge([make_anchor(nn.Linear(2, 2), 0), make_anchor(nn.Linear(2, 3), 1)])


def test_layers_keep_the_order_of_the_model(tmp_path):
    model = nn.ModuleDict({"z": nn.Linear(2, 2), "a": nn.Linear(2, 2)})
    importance = [{"layer": n, "parameters": 6, "share": 0.5, "mean": 1.0, "max": 1.0} for n in ("z", "a")]
    path = make_anchor(model, 0, importance=importance).save(tmp_path / "a.safetensors").path
    assert [layer["layer"] for layer in ewc.merge(path).provenance.importance] == ["z", "a"]


def test_too_large_for_its_numbers():
    model = nn.Linear(2, 2)
    with pytest.raises(NonFiniteError):
        ewc.merge([make_anchor(model, 0), make_anchor(model, 1)], lambdas=1e308)


@pytest.mark.slow
def test_a_thousand_anchors_in_the_memory_of_one(tmp_path):
    """What stacking them adds to the process is the result and a few tensors, not a thousand times as much."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))  # half a megabyte
    anchor = make_anchor(model, 0).save(tmp_path / "0.safetensors")
    for n in range(1, 1000):
        os.link(anchor.path, tmp_path / f"{n}.safetensors")
    script = """
import resource, sys, torch
from pathlib import Path
from ewc_finetune import Anchor
from ewc_finetune.penalty.quadratic import sum_quadratics
paths = sorted(Path(sys.argv[1]).glob("*.safetensors"))[: int(sys.argv[2])]
sum_quadratics([Anchor.open(paths[0])], [1.0])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = sum_quadratics([Anchor.open(path) for path in paths], [1.0] * len(paths))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""

    def growth(count):
        done = subprocess.run(
            [sys.executable, "-c", script, tmp_path, str(count)], check=True, capture_output=True, text=True
        )
        return float(done.stdout)

    assert growth(1000) < 20  # all of them would take 1,000 MB


def test_a_running_anchor_takes_any_number(tmp_path):
    """What is known of the parents does not nest: each is there once, with what is left of its lambda."""
    model = nn.Linear(2, 2)
    running = make_anchor(model, 0).save(tmp_path / "0.safetensors")
    for n in range(1, 150):
        running = ewc.merge(
            [running, make_anchor(model, n)], online=True, gamma=0.9, output=tmp_path / f"{n}.safetensors"
        )
    parents = Anchor.load(running.path).provenance.merged["parents"]
    assert len(parents) == 150
    assert parents[-3]["lambda"] == pytest.approx(0.9**2)
    assert running.path.stat().st_size < 300_000


def test_an_anchor_of_nothing_is_refused_when_it_is_read(tmp_path):
    model = nn.Linear(2, 2)
    path = make_anchor(model, 0).save(tmp_path / "a.safetensors").path
    tensors = {n: torch.zeros_like(t) if n.startswith("fisher.") else t for n, t in load_file(path).items()}
    save_file(tensors, path, {"format": "ewc-anchor", "format_version": "1", "anchor": '{"name": "x"}'})
    with pytest.raises(AnchorError, match="the Fisher is zero everywhere"):
        Penalty(model, path, 1.0)


def test_lambda_zero_is_as_if_it_were_not_there():
    model = trained(Small(), torch.float32)
    a, b = make_anchor(model, 0), make_anchor(model, 1)
    a, b = (replace(x, buffers={"n": torch.tensor([v])}) for x, v in ((a, 1.0), (b, 5.0)))
    merged = ewc.merge([a, b], lambdas=[1.0, 0.0])
    assert merged.buffers["n"] == 1.0
    assert merged.provenance.name == a.provenance.name


def test_half_precision_throughout(tmp_path):
    """What no anchor holds is in one precision with the centre, or no model could compute with both."""
    model = trained(nn.Linear(3, 2), torch.bfloat16)
    anchors = [
        replace(make_anchor(model, n, missing=["bias"]), buffers={"b": torch.ones(1).bfloat16()}) for n in (0, 1)
    ]
    merged = ewc.merge(anchors)
    assert {t.dtype for t in (*merged.weights.values(), *merged.buffers.values())} == {torch.float32}
