"""Domains with classes of their own: a new head, an expanded one, and outputs that do not count."""

import json

import pytest
import torch
from support.anchors import make_anchor
from support.models import Small, trained
from support.notes import Notes
from torch import nn
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune import Anchor, Penalty
from ewc_finetune.anchor.heads import with_head_of
from ewc_finetune.curvature.fisher import compute_fisher
from ewc_finetune.errors import AnchorMismatchError, ArchitectureError, DataError, UsageError
from ewc_finetune.likelihood.active import Active
from ewc_finetune.likelihood.categorical import Categorical
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.modules.heads import find_head, replace_head
from ewc_finetune.penalty.quadratic import sum_quadratics

ARCHITECTURE = "mlp?in_features=4&hidden=8&num_classes=3&batch_norm=false"


def data(classes, offset=0, shift=0.0, n=90):
    generator = torch.Generator().manual_seed(classes + offset)
    labels = torch.arange(n) % classes
    inputs = torch.randn(n, 4, generator=generator) + 3 * nn.functional.one_hot(labels, 4) + shift
    return TensorDataset(inputs, labels + offset)


@pytest.fixture
def anchored(tmp_path):
    """An anchor file of a model with three outputs."""
    ewc.finetune(ARCHITECTURE, data(3), epochs=20, lr=0.01, batch_size=30, output=tmp_path / "m.pt", eval_on=[])
    return ewc.consolidate(tmp_path / "m.pt", data(3), output=tmp_path / "a.safetensors").path


def test_a_new_head_leaves_the_old_one_in_the_anchor(anchored, tmp_path):
    done = ewc.finetune(
        None,
        data(2, shift=1.0),
        anchors=anchored,
        lambdas=1e3,
        head="new",
        epochs=40,
        lr=0.02,
        output=tmp_path / "n.pt",
    )
    assert done.model.head.out_features == 2
    (new,) = ewc.evaluate(tmp_path / "n.pt", data(2, shift=1.0))
    (old,) = ewc.evaluate(tmp_path / "n.pt", data(3), head=anchored)
    (before,) = ewc.evaluate(anchored, data(3))
    assert new.accuracy > 0.9
    assert old.accuracy > before.accuracy - 0.05
    assert before.accuracy > 0.9
    with pytest.raises(DataError, match="labels are not among the model's 2 classes"):
        ewc.evaluate(tmp_path / "n.pt", data(3))


def test_an_expanded_head_holds_the_old_outputs(anchored, tmp_path):
    """Training nothing else, the old rows are pulled and the new ones are free."""
    done = ewc.finetune(
        None, data(2, offset=3), anchors=anchored, lambdas=100.0, head="expand", epochs=2, output=tmp_path / "e.pt"
    )
    assert done.model.head.out_features == 5
    assert torch.load(tmp_path / "e.pt", weights_only=True)["head.weight"].shape == (5, 8)
    anchor = Anchor.load(anchored)
    model = done.model
    penalty = Penalty(model, anchor, 2.0, growing=["head.weight", "head.bias"])
    penalty.add_gradient()
    pull = 2.0 * anchor.fisher["head.weight"] * (model.head.weight.detach()[:3] - anchor.weights["head.weight"])
    torch.testing.assert_close(model.head.weight.grad[:3], pull)
    assert not model.head.weight.grad[3:].any()
    # The next anchor knows five rows; both stack, the older one holding its three.
    ewc.consolidate(tmp_path / "e.pt", data(2, offset=3), output=tmp_path / "b.safetensors")
    both = ewc.finetune(
        None, data(1, offset=5), anchors=[anchored, tmp_path / "b.safetensors"], head="expand", epochs=1
    )
    assert both.model.head.out_features == 6
    merged = ewc.merge(
        [anchored, tmp_path / "b.safetensors"],
        head="expand",
        output=tmp_path / "c.safetensors",
        checkpoint=tmp_path / "c.pt",
    )
    assert merged.weights["head.weight"].shape == (5, 8)
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    assert torch.equal(state["head.weight"], merged.weights["head.weight"])
    assert torch.equal(state["head.weight"][3:], model.head.weight[3:])
    again = ewc.finetune(None, data(1, offset=5), anchors=merged, head="expand", epochs=0)
    assert again.model.head.out_features == 6
    with pytest.raises(AnchorMismatchError, match=r"head.bias has shape \(3,\) in the anchor and \(5,\)"):
        ewc.finetune(None, data(3), anchors=[anchored, tmp_path / "b.safetensors"])


def test_what_becomes_of_the_head_is_said(anchored):
    notes = Notes()
    done = ewc.finetune(None, data(3), anchors=anchored, head="expand", epochs=0, progress=notes)
    assert done.model.head.out_features == 3
    assert "head head: data has no label beyond its 3 outputs, so none is added" in notes.lines
    done = ewc.finetune(None, data(2, offset=3), anchors=anchored, head="expand", epochs=0, progress=notes)
    assert "head head: 2 more outputs beside the 3" in notes.lines
    done = ewc.finetune(None, data(2), anchors=anchored, head="new", epochs=0, progress=notes)
    assert "head head: a new one, with 2 outputs in the place of 3" in notes.lines


def test_the_rows_that_anchors_know_by_hand():
    """A stack of a short and a long anchor is the sum of both penalties, on the rows that each knows."""
    short, long = (trained(nn.Linear(3, rows), torch.float32, seed=rows) for rows in (2, 4))
    model = trained(nn.Linear(3, 5), torch.float32)
    anchors, names = [make_anchor(short, 0), make_anchor(long, 1)], ["weight", "bias"]
    for order in (anchors, anchors[::-1]):
        penalty = Penalty(model, order, [2.0, 2.0], growing=names)
        expected = 0.0
        for anchor in order:
            for name, p in model.named_parameters():
                f = anchor.fisher[name].double()
                expected += (f * (p[: len(f)].double() - anchor.weights[name].double()) ** 2).sum().item()
        assert penalty.value() == pytest.approx(expected, rel=1e-5)
    merged = Penalty(model, ewc.merge(anchors, lambdas=[2.0, 2.0], head="expand"), 1.0, growing=names)
    assert merged.value() == pytest.approx(expected, rel=1e-5)
    running = ewc.merge(anchors, online=True, gamma=0.5, head="expand")
    torch.testing.assert_close(
        running.fisher["bias"][:2], 0.5 * anchors[0].fisher["bias"] + anchors[1].fisher["bias"][:2]
    )
    torch.testing.assert_close(running.fisher["bias"][2:], anchors[1].fisher["bias"][2:])
    assert torch.equal(running.weights["weight"], anchors[1].weights["weight"])
    with pytest.raises(AnchorMismatchError, match="give it --head new or expand"):
        Penalty(model, anchors[0], 1.0)
    free = Penalty(model, anchors[0].without(names), 1.0)
    assert free.free == ("weight", "bias")


def test_latest_with_an_expanded_head(anchored, tmp_path):
    """The older curvature moves to the newer weights, of the head the rows that it knows."""
    done = ewc.finetune(None, data(2, offset=3), anchors=anchored, head="expand", epochs=1, output=tmp_path / "e.pt")
    b = ewc.consolidate(done.output, data(2, offset=3), output=tmp_path / "b.safetensors")
    a = Anchor.load(anchored)
    names = ["head.weight", "head.bias"]
    found = sum_quadratics([a, b], [1.0, 1.0], "latest", growing=names)
    for name, centre in found.centre.items():
        assert torch.equal(centre, b.weights[name])
        rows = len(a.fisher[name])
        torch.testing.assert_close(found.curvature[name][:rows], a.fisher[name] + b.fisher[name][:rows])
        assert torch.equal(found.curvature[name][rows:], b.fisher[name][rows:])
    # In the wrong order the merged anchor is still of a model that there is.
    turned = ewc.merge([b, a], head="expand", output=tmp_path / "c.safetensors", checkpoint=tmp_path / "c.pt")
    assert turned.provenance.checkpoint["architecture"] == b.provenance.checkpoint["architecture"]
    bare = ewc.consolidate(done.output, data(2, offset=3), exclude=["head.*"])
    for head in ("shared", "expand"):
        with pytest.raises(AnchorMismatchError, match=r"does not hold it, and \(3, 8\) where it is held"):
            ewc.merge([a, bare], head=head)


def test_only_one_layer_can_have_been_expanded():
    short, long = (make_anchor(nn.Sequential(nn.Linear(3, n), nn.Linear(n, 2)), n) for n in (2, 4))
    with pytest.raises(AnchorMismatchError, match="only one layer can have been expanded"):
        ewc.merge([short, long], head="expand")

    class Scalar(nn.Module):
        def __init__(self, *shape):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(shape))
            self.other = nn.Parameter(torch.ones(2))

    with pytest.raises(AnchorMismatchError, match=r"scale has shape \(\) in"):
        ewc.merge([make_anchor(Scalar(), 0), make_anchor(Scalar(3), 1)], head="expand")


def test_a_new_head_of_a_module_is_known_to_the_next_anchor(anchored):
    model = ewc.finetune(None, data(3), anchors=anchored, epochs=0).model
    done = ewc.finetune(model, data(2), head="new", epochs=0)
    assert done.head["parameters"] == ["head.weight", "head.bias"]
    b = ewc.consolidate(model, data(2), head=done.head)
    merged = ewc.merge([anchored, b])
    assert torch.equal(merged.weights["head.weight"], b.weights["head.weight"])


def test_the_models_own_head_counts(anchored, tmp_path):
    """Not the newest anchor's: an anchor of the model's head holds it in any order."""
    other = ewc.finetune(None, data(3, shift=1.0), anchors=anchored, head="new", epochs=1, output=tmp_path / "d.pt")
    ewc.consolidate(other.output, data(3, shift=1.0), output=tmp_path / "d.safetensors")
    for order in ([anchored, tmp_path / "d.safetensors"], [tmp_path / "d.safetensors", anchored]):
        notes = Notes()
        ewc.finetune(tmp_path / "m.pt", data(3), anchors=order, epochs=0, progress=notes)
        assert not any("free, since" in line for line in notes.lines)
        assert f"{tmp_path / 'd.safetensors'} has another last layer than the model" in "".join(notes.lines)


def test_heads_that_cannot_be_given(anchored):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    with pytest.raises(ArchitectureError, match="is parametrised by"):
        replace_head(model, 5, keep=True)
    targets = TensorDataset(torch.randn(6, 4), torch.rand(6))
    for head in ("new", "expand"):
        with pytest.raises(DataError, match="has no class for each sample"):
            ewc.finetune(None, targets, anchors=anchored, head=head)
    loader = torch.utils.data.DataLoader(data(2, offset=3), batch_size=10)
    with pytest.raises(DataError, match="does not show its labels beforehand"):
        ewc.finetune(None, loader, anchors=anchored, head="expand")


def test_heads_are_found_and_replaced():
    model = Small()
    name, head = find_head(model)
    assert name == "last"
    assert replace_head(model, 7, keep=True) == (name, head)
    assert torch.equal(model.last.weight[:3], head.weight)
    assert model(torch.zeros(2, 4)).shape == (2, 7)
    with pytest.raises(ArchitectureError, match="has 7 outputs; it cannot expand to 2"):
        replace_head(model, 2, keep=True)
    with pytest.raises(ArchitectureError, match="no linear layer to take for its head"):
        find_head(nn.Conv2d(1, 1, 1))

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.out = nn.Linear(4, 5, bias=False)
            self.out.weight = self.embed.weight

    with pytest.raises(ArchitectureError, match="the head out shares its weight with embed"):
        find_head(Tied())
    with pytest.raises(AnchorMismatchError, match="the model's head is last .* has no such layer"):
        with_head_of(Small(), make_anchor(nn.Linear(2, 2), 0))


@pytest.mark.parametrize(("labels", "way"), [((1, 2, 3), "offset=-1"), ((10, 20, 30), "labels=10,20,30")])
def test_labels_that_do_not_begin_at_0(labels, way, tmp_path):
    rows = "".join(f"{n % 3},{n % 5},{labels[n % 3]}\n" for n in range(30))
    (tmp_path / "t.csv").write_text(f"a,b,label\n{rows}")
    spec, head = f"table:{tmp_path / 't.csv'}", {"head": "new", "epochs": 0, "eval_on": []}
    notes = Notes()
    done = ewc.finetune(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 9)), spec, progress=notes, **head)
    assert done.model[1].out_features == labels[-1] + 1
    assert notes.about(f"sample has; {way} numbers them from 0")
    followed = ewc.finetune(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 9)), f"{spec}?{way}", **head)
    assert followed.model[1].out_features == 3


def test_architectures_that_cannot_say_their_outputs(anchored, tmp_path, monkeypatch):
    (tmp_path / "with_head.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Flatten(), nn.Linear(4, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArchitectureError, match="with_head:Net does not take its number of outputs"):
        ewc.finetune("with_head:Net", data(2), head="new", epochs=1, output=tmp_path / "x.pt")
    assert ewc.finetune("with_head:Net", data(2), head="new", epochs=1).model[1].out_features == 2


@pytest.mark.parametrize("estimator", ["exact", "predicted", "empirical"])
def test_the_fisher_of_active_outputs_is_that_of_a_model_without_the_others(estimator):
    model = trained(Small())
    inputs, active = torch.randn(12, 4, dtype=torch.float64), [0, 2]
    targets = torch.tensor(active)[torch.arange(12) % 2]
    found = compute_fisher(model, [(inputs, targets)], Active(Categorical(), active), estimator)

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x)[:, active]

    expected = compute_fisher(Cut(), [(inputs, targets // 2)], Categorical(), estimator)
    for name, value in found.values.items():
        torch.testing.assert_close(value, expected.values[f"model.{name}"], rtol=1e-10, atol=1e-15)
    assert found.scores == pytest.approx(expected.scores)


def test_sampled_labels_are_active_ones():
    likelihood = Active(Categorical(), [1, 4])
    drawn = likelihood.sample(torch.randn(100, 6), torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {1, 4}


def test_active_outputs_that_are_not_there(anchored):
    with pytest.raises(UsageError, match="the gaussian likelihood has none"):
        Active(get_likelihood("gaussian"), [0])
    with pytest.raises(DataError, match="output 9 is to be active, and the model has 3 outputs"):
        Active(Categorical(), [0, 9]).check_outputs(torch.zeros(2, 3), "here")
    with pytest.raises(DataError, match="here: 1 of 2 labels are not among the active outputs: found 2"):
        Active(Categorical(), [0, 1]).check_targets(torch.tensor([0, 2]), (3,), "here")


def test_from_the_command_line(ewc_ft):
    """Five digits first, then the other five: all outputs, or the new ones alone."""
    ewc_ft("finetune", "--model", "mlp?hidden=32", "--data", "digits?classes=0-4", "--epochs", 10, "--lr", 0.01,
           "--output", "m.pt", "--eval", "digits?classes=0-4&active=0-4")  # fmt: skip
    ewc_ft("consolidate", "m.pt", "--data", "digits?classes=0-4&active=0-4")
    ewc_ft("finetune", "--anchors", "m.anchor.safetensors", "--data", "digits?classes=5-9&active=5-9", "--lambda", 1e4,
           "--epochs", 10, "--lr", 0.01, "--output", "n.pt")  # fmt: skip
    result = ewc_ft("evaluate", "n.pt", "--json", "--data", "digits?classes=0-4&active=0-4",
                    "--data", "digits?classes=5-9&active=5-9")  # fmt: skip
    old, new = (score["accuracy"] for score in json.loads(result.stdout)["scores"])
    assert old > 0.9
    assert new > 0.7
    ewc_ft("finetune", "--anchors", "m.anchor.safetensors", "--data", "digits?offset=10&limit=300", "--head", "expand",
           "--epochs", 1, "--output", "x.pt")  # fmt: skip
    assert torch.load("x.pt", weights_only=True)["head.weight"].shape[0] == 20
    ewc_ft("finetune", "--anchors", "m.anchor.safetensors", "--data", "digits?limit=300&classes=0-2", "--head", "new",
           "--epochs", 1, "--output", "y.pt")  # fmt: skip
    result = ewc_ft("evaluate", "y.pt", "--data", "digits?classes=0-4", "--head", "m.anchor.safetensors", "--json")
    assert json.loads(result.stdout)["scores"][0]["accuracy"] > 0.8
    result = ewc_ft("evaluate", "n.pt", "--data", "digits?active=5-9", expect=1)
    assert "labels are not among the active outputs: found 0, 1, 2, 3, 4" in result.stderr
    assert (
        "active=0-99999999 is not understood"
        in ewc_ft("evaluate", "n.pt", "--data", "digits?active=0-99999999", expect=2).stderr
    )


def test_two_heads_are_not_averaged_though_they_are_of_one_shape(anchored, tmp_path):
    """Each was trained from its own start; what one says of its rows means nothing to the other."""
    ewc.finetune(None, data(3, shift=1.0), anchors=anchored, head="new", epochs=2, output=tmp_path / "n.pt")
    new = ewc.consolidate(tmp_path / "n.pt", data(3, shift=1.0), output=tmp_path / "b.safetensors")
    assert new.provenance.head["parameters"] == ["head.weight", "head.bias"]
    notes = Notes()
    merged = ewc.merge([anchored, tmp_path / "b.safetensors"], progress=notes)
    assert any("has another last layer than" in note for note in notes.lines)
    for name in ("head.weight", "head.bias"):
        assert torch.equal(merged.fisher[name], new.fisher[name])
        assert torch.equal(merged.weights[name], new.weights[name])
    assert not torch.equal(merged.fisher["body.linear1.weight"], new.fisher["body.linear1.weight"])
    # A model that has the new head is not pulled to the old one, whoever pulls.
    done = ewc.finetune(
        tmp_path / "n.pt", data(3), anchors=anchored, lambdas=1e6, optimizer="sgd", penalty_form="proximal", epochs=1
    )
    old = Anchor.load(anchored).weights
    assert torch.allclose(done.model.body.linear1.weight, old["body.linear1.weight"], atol=1e-2)
    assert not torch.allclose(done.model.head.weight, old["head.weight"], atol=1e-1)
    # What is trained on from it has the same head, and stacks with it.
    ewc.finetune(None, data(3), anchors=tmp_path / "b.safetensors", epochs=1, output=tmp_path / "c.pt")
    after = ewc.consolidate(tmp_path / "c.pt", data(3))
    assert after.provenance.head == new.provenance.head


@pytest.mark.parametrize(
    "failing", [{"likelihood": "bernoulli"}, {"eval_on": ["nosuch"]}, {"lr": 1e30, "batch_size": 10}]
)
def test_a_callers_head_comes_back_if_the_run_fails(anchored, failing):
    model = ewc.finetune(ARCHITECTURE, data(3), epochs=1, eval_on=[]).model
    head, weight = model.head, model.head.weight.detach().clone()
    with pytest.raises(ewc.EwcError):
        ewc.finetune(model, data(2), anchors=anchored, head="new", epochs=2, **{"eval_on": [], **failing})
    assert model.head is head
    assert torch.equal(model.head.weight, weight)


def test_frozen_heads(anchored, tmp_path):
    model = ewc.finetune(ARCHITECTURE, data(3), epochs=1, eval_on=[]).model
    model.head.requires_grad_(False)
    with pytest.raises(ArchitectureError, match="the head head is frozen, and new outputs would be too"):
        ewc.finetune(model, data(2, offset=3), head="expand", epochs=1)
    done = ewc.finetune(model, data(2), head="new", epochs=1)
    assert done.model.head.weight.requires_grad


def test_a_head_that_is_not_listed_last():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(5, 3)
            self.body = nn.Linear(4, 5)

        def forward(self, x):
            return self.head(self.body(x).relu())

    model = Backwards()
    body = model.body
    with pytest.raises(DataError, match="does not go into the model"):
        ewc.finetune(model, data(2), head="new", epochs=1)
    assert model.body is body
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 4))
    model.forward = model[0].forward  # the other has no part in the outputs
    with pytest.raises(ArchitectureError, match="its outputs come from another layer"):
        ewc.finetune(model, data(2), head="new", epochs=1)


def test_the_old_heads_classes_are_those_of_the_anchor(ewc_ft, tmp_path):
    """The new domain numbers its classes otherwise; with the old head the old numbers count."""
    from PIL import Image

    for folder, names in (("old", ("cat", "dog")), ("new", ("ant", "cat", "dog"))):
        for number, name in enumerate(names):
            (tmp_path / folder / name).mkdir(parents=True)
            for n in range(4):
                Image.new("L", (4, 4), 40 * number + n).save(tmp_path / folder / name / f"{n}.png")
    old = "imagefolder:old?channels=1"
    ewc_ft("finetune", "--model", "mlp?hidden=4", "--data", old, "--epochs", 1, "--output", "o.pt")
    ewc_ft("consolidate", "o.pt", "--data", old)
    result = ewc_ft("finetune", "--anchors", "o.anchor.safetensors", "--data", "imagefolder:new?channels=1",
                    "--head", "new", "--epochs", 1, "--output", "n.pt")  # fmt: skip
    assert "domains are scored with the new head" in result.stderr
    ewc_ft("evaluate", "n.pt", "--data", old, "--head", "o.anchor.safetensors")
