"""Rehearsal: the loss is the divergence from the old answers, and what is measured by is never rehearsed."""

import copy
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.domains import OLD, blobs
from support.models import Small
from support.notes import Notes
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ewc_finetune as ewc
from ewc_finetune.anchor.probe_tensors import Probe
from ewc_finetune.data.input_spec import InputSpec
from ewc_finetune.errors import AnchorMismatchError, DataError, UsageError
from ewc_finetune.evaluation.probe import measure
from ewc_finetune.likelihood.active import Active
from ewc_finetune.likelihood.categorical import PerToken
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.likelihood.top_answers import TopAnswers
from ewc_finetune.rehearsal import sources
from ewc_finetune.rehearsal.held_out import held_out, keys_of
from ewc_finetune.rehearsal.memory import Memory, Order
from ewc_finetune.rehearsal.rehearsal import Rehearsal
from ewc_finetune.rehearsal.teacher import as_anchored
from ewc_finetune.rehearsal.variations import varied

# Elsewhere than the old domain, and numbered otherwise: to learn it is to forget the old one, though it need not be.
_INPUTS, _LABELS = blobs(shift=8.0, seed=1).tensors
NEW = TensorDataset(_INPUTS, (_LABELS + 1) % 3)
LAYOUT = {"shape": [4], "flat": False, "bytes_to_unit": False}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = Small()
    ewc.finetune(net, OLD, epochs=3, lr=1e-2, batch_size=20, eval_on=[])
    return net


@pytest.fixture(scope="module")
def anchor(model, tmp_path_factory):
    return ewc.consolidate(model, OLD, probe=80, output=tmp_path_factory.mktemp("a") / "a.safetensors").path


def probe_of(outputs, likelihood="categorical", counted=None, active=None):
    """A probe whose answers are those that a likelihood keeps of these outputs, in float64."""
    rule = get_likelihood(likelihood)
    rule = rule if active is None else Active(rule, active)
    rows = outputs if counted is None else outputs[counted]
    inputs = torch.zeros(len(outputs), 4)
    return Probe(inputs, rule.answers(rows), "old", None, likelihood, LAYOUT, active, 0, counted), rule


class Answering(nn.Module):
    """Answers any batch with the outputs that it was given."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = nn.Parameter(outputs)

    def forward(self, inputs):
        return self.outputs[: len(inputs)]


def softmax(row):
    top = max(row)
    total = sum(math.exp(x - top) for x in row)
    return [math.exp(x - top) / total for x in row]


def divergence(p, q):
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


@pytest.mark.parametrize("active", [None, (0, 2)])
def test_the_loss_of_classes_is_the_divergence_and_its_gradient_q_minus_p(active):
    torch.manual_seed(1)
    old, new = 3 * torch.randn(5, 3, dtype=torch.float64), 3 * torch.randn(5, 3, dtype=torch.float64)
    probe, rule = probe_of(old, active=active)
    model = Answering(new)
    loss = Memory("a", probe, rule).divergence(model, [0, 1, 2, 3, 4])
    loss.backward()
    columns = list(range(3) if active is None else active)
    pairs = [(softmax(p[columns].tolist()), softmax(q[columns].tolist())) for p, q in zip(old, new, strict=True)]
    assert loss.item() == pytest.approx(sum(divergence(p, q) for p, q in pairs) / 5, rel=1e-9)
    expected = torch.zeros(5, 3, dtype=torch.float64)
    for row, (p, q) in enumerate(pairs):
        expected[row, columns] = (torch.tensor(q).double() - torch.tensor(p).double()) / 5
    torch.testing.assert_close(model.outputs.grad, expected, rtol=1e-6, atol=1e-9)


def test_the_losses_of_yes_and_no_and_of_numbers():
    old, new = torch.tensor([[1.0, -2.0], [0.5, 3.0]]).double(), torch.tensor([[0.0, 1.0], [2.0, 2.5]]).double()
    probe, rule = probe_of(old, "bernoulli")
    expected = 0.0
    for a, b in zip(old.flatten().tolist(), new.flatten().tolist(), strict=True):
        p, q = 1 / (1 + math.exp(-a)), 1 / (1 + math.exp(-b))
        expected += divergence([p, 1 - p], [q, 1 - q])
    assert Memory("a", probe, rule).divergence(Answering(new), [0, 1]).item() == pytest.approx(expected / 2)
    probe, rule = probe_of(old, "gaussian")
    half = 0.5 * (old - new).square().sum().item()
    assert Memory("a", probe, rule).divergence(Answering(new), [0, 1]).item() == pytest.approx(half / 2)


def test_the_loss_of_tokens_is_summed_over_those_that_count():
    torch.manual_seed(2)
    old, new = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    counted = torch.tensor([[True, False, True], [False, True, False]])
    probe, rule = probe_of(old, "per-token", counted)
    loss = Memory("a", probe, rule).divergence(Answering(new), [0, 1])
    rows = [(softmax(old[n, t].tolist()), softmax(new[n, t].tolist())) for n, t in counted.nonzero().tolist()]
    assert loss.item() == pytest.approx(sum(divergence(p, q) for p, q in rows) / 2, rel=1e-9)
    only = probe.subset([1])
    assert len(only.outputs) == 1
    torch.testing.assert_close(only.outputs[0], rule.answers(old[1, 1][None])[0])
    assert probe.subset([1, 0]).outputs[1:].equal(probe.subset([0]).outputs)


@given(st.integers(2, 12), st.integers(1, 14), st.integers(0, 100))
def test_top_answers_are_a_coarser_view(classes, k, seed):
    torch.manual_seed(seed)
    old, new = 2 * torch.randn(6, classes, dtype=torch.float64), 2 * torch.randn(6, classes, dtype=torch.float64)
    top, full = TopAnswers(k), PerToken()
    nats = top.divergence(top.answers(old), new)
    assert (nats <= full.divergence(full.answers(old), new) + 1e-9).all()
    for row in range(6):
        p, q = softmax(old[row].tolist()), softmax(new[row].tolist())
        likeliest = sorted(range(classes), key=lambda y: -p[y])[:k]
        events = [(p[y], q[y]) for y in likeliest] + [
            (1 - sum(p[y] for y in likeliest), 1 - sum(q[y] for y in likeliest))
        ]
        expected = sum(a * (math.log(a) - math.log(max(b, 1e-12))) for a, b in events if a > 1e-11)
        assert nats[row].item() == pytest.approx(expected, rel=1e-6, abs=1e-8)
    assert top.comparable(top.answers(old), new)
    assert (top.unchanged(top.answers(old), old) == 1).all()


def test_a_model_that_is_sure_of_the_top_answers_is_pulled_to_the_others():
    """As far as it is wrong, to the last digit: of one minus what is nearly one nothing would be left."""
    outputs = torch.cat([torch.full((1, 4), 60.0), torch.zeros(1, 36)], dim=1).requires_grad_()
    top = TopAnswers(4)
    answers = top.answers(torch.cat([torch.full((1, 4), 1e-6), torch.zeros(1, 36)], dim=1))
    loss = top.divergence(answers, outputs).sum()
    loss.backward()
    p, q = [0.1, 0.9], softmax([60.0 + math.log(4), math.log(36)])
    q[1] = math.exp(math.log(36) - 60 - math.log(4))
    assert loss.item() == pytest.approx(divergence(p, q), rel=1e-5)
    assert outputs.grad[0, :4].sum().item() == pytest.approx(0.9, rel=1e-5)
    assert outputs.grad[0, 4:].sum().item() == pytest.approx(-0.9, rel=1e-5)


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 9))
def test_all_are_drawn_before_any_comes_again(size, n, seed):
    order = Order(size, torch.Generator().manual_seed(seed))
    drawn = [order.draw(n).tolist() for _ in range(6)]
    assert all(len(set(one)) == len(one) == min(n, size) for one in drawn)
    counts = torch.bincount(torch.tensor([number for one in drawn for number in one]), minlength=size)
    assert counts.max() - counts.min() <= 1


def test_a_quarter_is_held_out_and_always_the_same(model, anchor):
    (probe,) = ewc.Anchor.load(anchor).probes
    left = held_out(probe, "a")
    assert len(left) == 20
    assert left == held_out(probe, "b")
    assert len(held_out(probe.subset(range(40)), "a")) == 16
    with pytest.raises(UsageError, match="a: its probe of data has 31 inputs, of which 16 must stay"):
        held_out(probe.subset(range(31)), "a")
    rehearsal = Rehearsal(copy.deepcopy(model), anchor)
    (memory,) = rehearsal.memories
    assert memory.given == 60
    assert rehearsal.measured[0].probes[0].inputs.equal(probe.inputs[left])
    assert memory.probe.inputs[:60].equal(probe.inputs[sorted(set(range(80)) - set(left))])
    seen = {tuple(row) for row in memory.probe.inputs.tolist()}
    assert not seen & {tuple(row) for row in rehearsal.measured[0].probes[0].inputs.tolist()}


def test_in_a_loop_of_ones_own(model, anchor):
    def adapt(rehearsed):
        net = copy.deepcopy(model).train()
        for module in net.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.Dropout)):
                module.eval()
        rehearsal = Rehearsal(net, anchor, batch_size=16) if rehearsed else None
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        inputs, labels = NEW.tensors
        for _ in range(60):
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), labels)
            if rehearsal is not None:
                loss = loss + rehearsal.loss()
            loss.backward()
            optimizer.step()
        net.eval()
        return (net(OLD.tensors[0]).argmax(1) == OLD.tensors[1]).float().mean().item()

    assert adapt(True) > adapt(False) + 0.1


def test_the_teacher_is_the_anchor_wherever_the_model_is(model, anchor):
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(torch.randn(p.shape))
    before = {name: value.clone() for name, value in moved.state_dict().items()}
    inputs = OLD.tensors[0][:40]
    with as_anchored(moved, ewc.Anchor.open(anchor)):
        moved.eval()
        torch.testing.assert_close(moved(inputs), model.eval()(inputs))
    assert all(value.equal(before[name]) for name, value in moved.state_dict().items())
    rehearsal = Rehearsal(moved, anchor, [TensorDataset(inputs)], variations=False)
    (memory,) = rehearsal.memories
    answers = model(memory.probe.inputs.float()).detach().softmax(1)
    torch.testing.assert_close(memory.probe.outputs.float().softmax(1), answers, rtol=2e-3, atol=2e-3)
    assert rehearsal.loss().item() > 0
    assert Rehearsal(model, anchor, [TensorDataset(inputs)]).loss().item() == pytest.approx(0, abs=1e-4)


def test_a_teacher_of_another_model_is_refused(anchor):
    with pytest.raises(AnchorMismatchError, match="no such layer|differ in more than the last layer"):
        Rehearsal(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), anchor, [OLD])


def finetuned(model, anchor, **options):
    common = {"epochs": 6, "lr": 1e-2, "batch_size": 20, "lambdas": 0.0, "eval_on": {"old": OLD}}
    return ewc.finetune(copy.deepcopy(model), NEW, anchors=anchor, **{**common, **options})


def keys(anchors):
    return {key for anchor in anchors for probe in anchor.probes for key in keys_of(probe.inputs)}


def rehearsed_keys(rehearsal):
    return {key for memory in rehearsal.memories for key in keys_of(memory.probe.inputs)}


def test_what_is_measured_with_is_never_rehearsed_wherever_it_comes_from(model, anchor):
    """Data that holds the probe, and probes that overlap."""
    other = ewc.consolidate(model, OLD, probe=50, seed=3)
    old = TensorDataset(OLD.tensors[0])
    for anchors, given_sources, left_out in (
        ([anchor], [old], [80]),
        ([anchor], ["probes", old], [0, 20]),
        ([anchor, other], "probes", None),
    ):
        rehearsal = Rehearsal(copy.deepcopy(model), anchors, given_sources)
        assert rehearsal.measured
        assert not keys(rehearsal.measured) & rehearsed_keys(rehearsal)
        if left_out is not None:
            assert [memory.left_out for memory in rehearsal.memories] == left_out
    assert sum(memory.left_out for memory in rehearsal.memories) > 0
    (probe,) = ewc.Anchor.load(anchor).probes
    with pytest.raises(UsageError, match="nothing of data can be rehearsed: all of it is in the probes"):
        Rehearsal(copy.deepcopy(model), anchor, TensorDataset(probe.inputs))


def test_a_centre_of_anchors_teaches_no_data(model, anchor, tmp_path):
    moved = copy.deepcopy(model)
    with torch.no_grad():
        next(moved.parameters()).add_(1)
    parts = [anchor, ewc.consolidate(moved, OLD, output=tmp_path / "b.safetensors").path]
    teachers = {}
    for online in (False, True):
        merged = ewc.merge(parts, output=tmp_path / f"{online}.safetensors", online=online).path
        (memory,) = Rehearsal(moved, merged, TensorDataset(OLD.tensors[0][:30])).memories
        teachers[online] = memory.teacher
    assert teachers == {False: "the model as it was", True: str(tmp_path / "True.safetensors")}


def test_fewer_inputs_than_a_step_would_rehearse(model, anchor):
    notes = Notes()
    few = TensorDataset(torch.randint(9, (12, 4)).float())
    finetuned(model, anchor, epochs=1, rehearse=[few], rehearse_batch=50, rehearse_variations=False, progress=notes)
    assert notes.about("each step rehearses all 12 inputs of data: there are not 50 of them")


def test_texts_are_the_same_however_they_are_filled_up():
    ids, mask = torch.tensor([[5, 6, 0], [5, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    wide = keys_of({"input_ids": ids, "attention_mask": mask})
    assert wide[0] != wide[1]
    assert wide == keys_of({"attention_mask": mask[:, :2], "input_ids": ids[:, :2]}) == list(dict.fromkeys(wide))
    assert wide[1] != keys_of({"input_ids": ids[1:].int(), "attention_mask": mask[1:]})[0]
    assert keys_of(torch.tensor([0.5, 0.5, 1.0]))[0] == keys_of(torch.tensor([0.5]))[0]


def test_a_loop_of_ones_own_is_told_what_is_wrong(model, anchor):
    for options, message in (
        ({"sources": []}, "there is nothing to rehearse"),
        ({"weight": -1.0}, "rehearse weight is -1.0"),
        ({"batch_size": 0}, "rehearse batch is 0"),
    ):
        with pytest.raises(UsageError, match=message):
            Rehearsal(model, anchor, **options)
    assert len(Rehearsal(model, anchor, ["probes", "probes"]).memories) == 1


def test_large_inputs_and_large_answers_are_no_more_than_fit(model, monkeypatch):
    monkeypatch.setattr(sources, "_BYTES_KEPT", 16 * 10)
    (memory,) = Rehearsal(copy.deepcopy(model), (), TensorDataset(OLD.tensors[0]), variations=False).memories
    assert memory.given == 10
    spec = InputSpec.read(LAYOUT)
    alone, beside = (varied(torch.rand(4, 1 << 18), spec, torch.Generator(), answer) for answer in (0, 3 << 20))
    assert (len(alone), len(beside)) == (256, 64)


def test_a_plain_run_of_a_search_has_no_help(model, anchor):
    options = {"rehearse": "probes", "rehearse_weight": 20.0}
    done = finetuned(model, anchor, lambdas="auto", epochs=2, **options)
    plain, *held = done.search.trials
    without, *_ = finetuned(model, anchor, lambdas="auto", epochs=2).search.trials
    assert plain.score == without.score
    assert plain.retention[0].samples == held[0].retention[0].samples == 20


@pytest.mark.parametrize("head", ["shared", "expand", "new"])
def test_a_search_has_what_it_rehearses_answered_once(model, anchor, monkeypatch, head):
    asked, take = [], sources.take_probe
    monkeypatch.setattr(sources, "take_probe", lambda *given: asked.append(given[1].domain.name) or take(*given))
    like = DataLoader(TensorDataset(OLD.tensors[0] + 0.1), 20)
    options = {"rehearse": ["probes", like], "lambdas": "auto", "epochs": 2, "head": head}
    once = finetuned(copy.deepcopy(model), anchor, **options)
    assert len(asked) == 3  # variations of the probe, the data, and variations of that
    monkeypatch.setattr(ewc.finetuning.run, "answers", lambda _: ())
    anew = finetuned(copy.deepcopy(model), anchor, **options)
    assert len(asked) >= 6 * 3
    assert once.search.trials == anew.search.trials
    assert once.history == anew.history
    assert all(map(torch.equal, once.model.state_dict().values(), anew.model.state_dict().values()))


def test_a_run_keeps_more_and_says_what_was_rehearsed(model, anchor, tmp_path):
    notes = Notes()
    done = finetuned(
        model,
        anchor,
        rehearse=["probes"],
        rehearse_batch=8,
        output=tmp_path / "m.pt",
        architecture="x:Y",
        progress=notes,
    )
    assert done.after[0].accuracy > finetuned(model, anchor).after[0].accuracy + 0.05
    assert "60 of 80 inputs of data are rehearsed, with 16,384 variations of them, answered by" in str(notes)
    assert "what is kept is measured by the other 20" in str(notes)
    (kept,) = done.retention
    assert kept.samples == 20
    document = json.loads((tmp_path / "m.run" / "run.json").read_text())
    (record,) = document["found"]["rehearsed"]
    assert record["variations"] == 16_384
    assert record["samples"] == 60
    assert record["held_out"] == held_out(ewc.Anchor.load(anchor).probes[0], "a")
    assert all("rehearsed" in line for line in done.history if "loss" in line)


@pytest.mark.parametrize(
    "options",
    [
        {"head": "new"},
        {"head": "expand"},
        {"accumulate": 2},
        {"norm_stats": "update"},
        {"amp": "bf16"},
        {"penalty_form": "proximal", "lambdas": 10.0},
    ],
)
def test_whatever_else_a_run_does(model, anchor, options):
    done = finetuned(model, anchor, epochs=2, rehearse=["probes", TensorDataset(OLD.tensors[0][:50])], **options)
    assert done.retention[0].samples == 20
    assert all(math.isfinite(line["rehearsed"]) for line in done.history if "loss" in line)


def test_without_an_anchor_the_model_itself_teaches(model):
    def kept(**options):
        common = {"epochs": 2, "lr": 1e-2, "batch_size": 20, "eval_on": {"old": OLD}}
        return ewc.finetune(copy.deepcopy(model), NEW, **common, **options).after[0].accuracy

    assert kept(rehearse=[TensorDataset(OLD.tensors[0])]) > kept() + 0.05


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rehearse_weight": -1.0}, UsageError, "rehearse weight is -1.0; expected a finite number, at least 0"),
        ({"rehearse_weight": math.nan}, UsageError, "rehearse weight is nan"),
        ({"rehearse_batch": 0}, UsageError, "rehearse batch is 0"),
        ({"rehearse_batch": 1, "norm_stats": "update"}, UsageError, "a step would rehearse one sample of a source"),
        ({"rehearse": [TensorDataset(torch.zeros(3, 7))]}, DataError, "samples have shape 7; the model takes 4"),
        ({"head": "new", "anchor": (), "rehearse": [OLD]}, UsageError, "with --head new the old head answers"),
        ({"rehearse": ["nonsense"]}, UsageError, "no data is called 'nonsense'"),
    ],
)
def test_what_cannot_be(model, anchor, options, error, message):
    with pytest.raises(error, match=message):
        finetuned(model, **{"anchor": anchor, "rehearse": ["probes"], "epochs": 1, **options})


def test_a_weight_of_0_rehearses_nothing_and_measures_by_the_same(model, anchor, tmp_path):
    notes = Notes()
    common = {"epochs": 2, "rehearse": ["probes", OLD], "output": tmp_path / "m.pt", "architecture": "x:Y"}
    done = finetuned(model, anchor, rehearse_weight=0.0, rehearse_batch=7, progress=notes, **common)
    plain = finetuned(model, anchor, epochs=2)
    for one, other in zip(done.model.parameters(), plain.model.parameters(), strict=True):
        assert one.equal(other)
    (probe,) = ewc.Anchor.load(anchor).probes
    assert done.retention == [
        measure(plain.model, probe.subset(held_out(probe, "a")), torch.device("cpu"), anchor=done.retention[0].anchor)
    ]
    assert not any("rehearsed" in line for line in done.history)
    assert "--rehearse-batch does nothing: --rehearse-weight 0 rehearses nothing" in str(notes)


def test_less_lambda_is_needed(model, anchor, tmp_path):
    found = {}
    for name, options in {"alone": {}, "rehearsed": {"rehearse": ["probes"]}}.items():
        finetuned(model, anchor, lambdas=None, epochs=1, output=tmp_path / f"{name}.pt", architecture="x:Y", **options)
        document = json.loads((tmp_path / f"{name}.run" / "run.json").read_text())
        found[name] = document["found"]["anchors"][0]["lambda"]
    assert found == {"alone": 100.0, "rehearsed": 10.0}


def test_anchors_without_probes(model, tmp_path):
    bare = ewc.consolidate(model, OLD, output=tmp_path / "b.safetensors").path
    with pytest.raises(UsageError, match="there is no probe to rehearse in the anchors: ewc-ft consolidate --probe N"):
        finetuned(model, bare, rehearse=["probes"])
