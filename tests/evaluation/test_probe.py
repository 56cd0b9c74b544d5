"""Probes: what of the old domain an anchor keeps, what is measured by it, and that nobody is deceived about either."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from support.domains import NEW, OLD
from support.files import record_of, save_changed
from support.models import Small, trained
from support.notes import Notes
from support.transformers_models import bert, corpus, llama, masked, reviews, saved
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ewc_finetune as ewc
from ewc_finetune import Anchor
from ewc_finetune.anchor.heads import foreign_head
from ewc_finetune.anchor.probe_tensors import Probe, ProbeFile
from ewc_finetune.checkpoint.builtin_models import MLP
from ewc_finetune.data.domain import as_domain
from ewc_finetune.data.input_spec import InputSpec, find_input_spec
from ewc_finetune.errors import AnchorError, AnchorMismatchError, DataError, NonFiniteError, UsageError
from ewc_finetune.evaluation.bound_domain import BoundDomain
from ewc_finetune.evaluation.probe import measure, take_probe
from ewc_finetune.evaluation.retention import meters
from ewc_finetune.likelihood.active import Active
from ewc_finetune.likelihood.base import IGNORED
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.modules.heads import replace_head

CPU = torch.device("cpu")
DRAWS = torch.Generator().manual_seed(0)


class Table(nn.Module):
    """Answers the sample number n with row n of a table."""

    def __init__(self, rows):
        super().__init__()
        self.rows = nn.Parameter(torch.as_tensor(rows, dtype=torch.float64))

    def forward(self, number):
        return self.rows[number[:, 0]]


def take(model, data, likelihood="categorical", n=1000, seed=0, active=None):
    domain = as_domain(data)
    rule = get_likelihood(likelihood)
    rule = rule if active is None else Active(rule, active)
    input_spec, _ = find_input_spec(model, domain, CPU, lambda outputs: rule.check_outputs(outputs, "test"))
    found = take_probe(model, BoundDomain(domain, input_spec, rule, ()), n, seed, CPU)
    if active is not None:  # as a data spec says it
        found = Probe(**{**vars(found), "active": active})
    return found


def compare(old, new, likelihood="categorical", labels=None, active=None, **options):
    """Measure a model that answers with one table by a probe of one that answered with another."""
    old = Table(old)
    numbers = torch.arange(len(old.rows))[:, None]
    data = TensorDataset(numbers) if labels is None else TensorDataset(numbers, torch.as_tensor(labels))
    return measure(Table(new), take(old, data, likelihood, active=active), CPU, **options)


def close(found, expected):
    assert found == pytest.approx(expected, rel=3e-3, abs=1e-5)


def softmax(row):
    most = max(row)
    total = sum(math.exp(x - most) for x in row)
    return [x - most - math.log(total) for x in row]


def divergence(old, new):
    """KL of two rows of logits, number by number; the new may have more."""
    p, q = softmax(old), softmax(new)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=False))


def randn(*shape):
    return torch.randn(*shape, generator=DRAWS, dtype=torch.float64)


# What is measured


@pytest.mark.parametrize("classes", [2, 10, 3000])
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("moved", [0.01, 0.3, 3.0])
def test_the_divergence_of_classes(classes, scale, moved):
    old = scale * randn(7, classes) + 100
    new = old + moved * randn(7, classes)
    expected = math.fsum(map(divergence, old.tolist(), new.tolist())) / 7
    found = compare(old, new)
    close(found.divergence, expected)
    assert found.unchanged == (old.argmax(dim=1) == new.argmax(dim=1)).double().mean().item()
    assert (found.samples, found.data) == (7, "data")


@pytest.mark.parametrize("sure", [math.log(1e8), 30.0, 80.0, 1e6, math.inf])
@pytest.mark.parametrize("then", [0.0, 5.0, math.log(1e8), 200.0])
def test_confident_answers(sure, then):
    """Of a class with 1 - 1e-8 too, and where the float's range ends."""
    found = compare([[sure, 0.0, -1.0]] if sure < math.inf else [[0.0, -math.inf, -math.inf]], [[then, 0.0, -1.0]])
    assert found.divergence == pytest.approx(
        divergence([min(sure, 1e6), 0.0, -1.0], [then, 0.0, -1.0]), rel=3e-3, abs=1e-9
    )
    assert found.unchanged == 1


def test_answers_that_were_ruled_out():
    """The divergence is finite, and says that something went badly wrong."""
    found = compare([[0.0, 1.0, -math.inf]], [[0.0, -math.inf, 1.0]])
    assert 1e4 < found.divergence < 1e5
    assert found.unchanged == 0


def test_ties():
    """Of classes that are as likely as each other each is the same answer; nearly is not."""
    old = [[1.0, 1.0, 0.0]] * 3
    assert compare(old, [[1.0, 1.0, 0.0], [2.0, 1.0, 0.0], [1.0, 2.0, 0.0]]).unchanged == 1
    assert compare(old, [[0.0, 0.0, 1.0]] * 3).unchanged == 0
    near = [[5.0, 5.0 + 1e-6, 0.0]]
    assert compare(near, near).unchanged == 1
    assert compare(near, [[5.0 + 1e-6, 5.0, 0.0]]).unchanged == 0


logits = st.lists(
    st.lists(st.floats(-1e5, 1e5) | st.floats(-1, 1), min_size=4, max_size=4),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(rows=logits, others=logits, likelihood=st.sampled_from(["categorical", "bernoulli", "gaussian"]))
def test_divergences_are_above_zero_and_zero_for_the_same_model(rows, others, likelihood):
    same = compare(rows, rows, likelihood)
    assert 0 <= same.divergence < (1e-5 if likelihood != "gaussian" else 1e-3)
    assert same.unchanged in (1, None)
    size = min(len(rows), len(others))
    other = compare(rows[:size], others[:size], likelihood)
    assert other.divergence >= 0
    assert other.unchanged is None or 0 <= other.unchanged <= 1


@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
def test_yes_or_no(scale):
    old, new = scale * randn(6, 5), scale * randn(6, 5)

    def log_sigmoid(x):
        return -math.log1p(math.exp(-x)) if x > -700 else x

    expected = math.fsum(
        math.exp(log_sigmoid(s * a)) * (log_sigmoid(s * a) - log_sigmoid(s * b))
        for a, b in zip(old.flatten().tolist(), new.flatten().tolist(), strict=True)
        for s in (1, -1)
    )
    found = compare(old, new, "bernoulli")
    close(found.divergence, expected / 6)
    assert found.unchanged == pytest.approx(((old > 0) == (new > 0)).double().mean().item())
    assert compare(old[:, 0], new[:, 0], "bernoulli").samples == 6
    assert compare([[1e9, 0.0]], [[1e9, -3.0]], "bernoulli").unchanged == 1


def test_regression():
    """Half the squared distance; means of any size keep the precision for it."""
    old = 1e3 * randn(6, 3) + 1e5
    new = old + randn(6, 3)
    found = compare(old, new, "gaussian")
    assert found.divergence == pytest.approx(0.5 * (old - new).square().sum().item() / 6, rel=0.02)
    assert found.unchanged is None
    close(
        compare(old[:, 0] - 1e5, new[:, 0] - 1e5, "gaussian").divergence, 0.5 * (old - new)[:, 0].square().mean().item()
    )
    assert "nats" in found.main
    assert "unchanged" not in found.main


def test_more_outputs_since():
    """Old classes take a smaller share of all; an answer that is new is another one."""
    old, new = randn(9, 3), torch.cat([randn(9, 3), 2 * randn(9, 2)], dim=1)
    found = compare(old, new)
    close(found.divergence, math.fsum(map(divergence, old.tolist(), new.tolist())) / 9)
    assert found.unchanged == (old.argmax(dim=1) == new.argmax(dim=1)).double().mean().item()
    assert compare([[1.0, 0.0]], [[1.0, 0.0, 9.0]]).unchanged == 0
    with pytest.raises(
        AnchorMismatchError, match=r"answers of shape \(5,\), and the model's outputs have shape \(3,\)"
    ):
        compare(new, old)


def test_outputs_that_do_not_count():
    active = (1, 3)
    old, new = randn(9, 4), randn(9, 6)
    found = compare(old, new, active=active)
    parts = old[:, active].tolist(), new[:, active].tolist()
    close(found.divergence, math.fsum(map(divergence, *parts)) / 9)
    assert found.unchanged == compare(*parts).unchanged
    moved = old.clone()
    moved[:, 0] += 100
    assert compare(old, moved, active=active).divergence < 1e-6


@pytest.mark.parametrize("labelled", [True, False])
def test_tokens(labelled):
    """Sums over the tokens that count, a sequence being one sample; of their answers the mean share."""
    old, new = randn(4, 5, 6), randn(4, 5, 6)
    labels = torch.randint(0, 6, (4, 5))
    labels[0, 2:] = labels[2] = labels[3, 0] = IGNORED
    counted = labels != IGNORED if labelled else torch.ones(4, 5, dtype=torch.bool)
    nats, shares = [], []
    for n in range(4):
        tokens = counted[n].nonzero()[:, 0].tolist()
        nats += [divergence(old[n, t].tolist(), new[n, t].tolist()) for t in tokens]
        if tokens:
            shares.append(sum(int(old[n, t].argmax() == new[n, t].argmax()) for t in tokens) / len(tokens))
    for size in (1, 3, 32):
        found = compare(old, new, "per-token", labels if labelled else None, batch_size=size)
        close(found.divergence, math.fsum(nats) / 4)
        assert found.unchanged == pytest.approx(sum(shares) / len(shares))
    numbers = torch.arange(4)[:, None]
    probe = take(Table(old), TensorDataset(numbers, labels) if labelled else TensorDataset(numbers), "per-token")
    assert probe.outputs.shape == (int(counted.sum()), 6)
    assert measure(Table(old), probe, CPU).unchanged == 1
    with pytest.raises(AnchorMismatchError, match="has 5 tokens"):
        measure(Table(old[:, :4]), probe, CPU)
    with pytest.raises(DataError, match="no token counts in the 4 samples"):
        compare(old, new, "per-token", torch.full((4, 5), IGNORED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_precision_and_batches_of_one(dtype, samples):
    model = trained(Small(), dtype)
    probe = take(model, samples)
    assert probe.outputs.dtype == torch.float16
    for other in (model, copy.deepcopy(model).float()):  # as they are trained
        for size in (1, 4, 100):
            found = measure(other, probe, CPU, batch_size=size)
            assert found.divergence < (1e-5 if dtype != torch.bfloat16 else 1e-3)
            assert found.unchanged == 1
    assert measure(model, probe, CPU) == measure(model, probe, CPU)


def test_it_is_the_same_for_any_batch(samples):
    """What is compared at once does not matter either."""
    old, new = trained(Small()), trained(Small(), seed=5)
    probe = take(old, samples)
    whole = measure(new, probe, CPU)
    for size in (1, 2, 7):
        part = measure(new, probe, CPU, batch_size=size)
        assert part.divergence == pytest.approx(whole.divergence, rel=1e-12)
        assert part.unchanged == whole.unchanged


def test_many_numbers_are_compared_in_parts(monkeypatch):
    old, new = randn(9, 5), randn(9, 5)
    whole = compare(old, new)
    monkeypatch.setattr("ewc_finetune.evaluation.probe._COMPARED", 10)
    assert compare(old, new).divergence == pytest.approx(whole.divergence, rel=1e-12)


def test_nothing_is_disturbed(samples):
    """Neither by taking a probe nor by measuring: mode, statistics, gradients, random state."""
    model = trained(Small(), torch.float32).train()
    model.norm.eval()
    model(torch.randn(3, 4)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    objects = list(map(id, model.modules()))
    state = torch.get_rng_state()
    probe = take(model, samples, n=8)
    replaced = copy.deepcopy(model)
    replace_head(replaced, 3, keep=False)
    torch.set_rng_state(state)
    measure(model, probe, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, model.norm.training, model.drop.training) == (True, False, True)
    assert list(map(id, model.modules())) == objects
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
        assert parameter.requires_grad


def test_models_that_cannot_be_measured(samples):
    model = trained(Small(), torch.float32)
    probe = take(model, samples)
    with pytest.raises(
        AnchorMismatchError, match="x.safetensors: its probe of data does not go into the model: .*mat1"
    ):
        measure(nn.Linear(5, 3), probe, CPU, anchor="x.safetensors")
    with torch.no_grad():
        model.last.bias.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="the model's divergence is nan"):
        measure(model, probe, CPU)
    with pytest.raises(NonFiniteError, match="answers samples of the probe with NaN"):
        take(model, samples)


# Which inputs are kept


def test_inputs_are_kept_as_they_are():
    images = torch.randint(0, 256, (30, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    model = MLP(16, 8, 3)
    probe = take(model, TensorDataset(images), n=5, seed=3)
    assert probe.inputs.dtype == torch.uint8
    assert probe.layout == {"shape": [1, 4, 4], "flat": True, "bytes_to_unit": True}
    assert all(any(torch.equal(kept, image) for image in images) for kept in probe.inputs)
    assert torch.equal(probe.inputs, take(model, TensorDataset(images), n=5, seed=3).inputs)
    assert not torch.equal(probe.inputs, take(model, TensorDataset(images), n=5, seed=4).inputs)
    assert measure(model, probe, CPU).divergence < 1e-6


@pytest.mark.parametrize(
    ("scale", "dtype"), [(1.0, torch.float16), (1e6, torch.float32), (1e-9, torch.float32), (100.0, torch.float16)]
)
def test_numbers_are_kept_in_half_precision_where_that_is_enough(scale, dtype):
    inputs = torch.randn(20, 4) * scale
    inputs[0, 0] = 0
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1)).double()
    probe = take(model, TensorDataset(inputs), n=20)
    assert probe.inputs.dtype == dtype
    torch.testing.assert_close(probe.inputs.float(), inputs, rtol=1e-3, atol=1e-3 * scale)
    assert measure(model, probe, CPU).divergence < 1e-5


class Bag(nn.Module):
    """Takes texts: token ids, with what fills them up marked."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 3)

    def forward(self, input_ids, attention_mask):
        return (self.embedding(input_ids) * attention_mask[..., None]).sum(dim=1)


def text_batches():
    for length in (3, 6, 2):
        ids = torch.randint(1, 20, (4, length))
        mask = torch.ones_like(ids)
        ids[0, -1], mask[0, -1] = 7, 0
        yield {"input_ids": ids, "attention_mask": mask}


def test_texts_of_several_lengths():
    """Batches of a loader are filled up with what fills them up already."""
    batches = list(text_batches())
    model = Bag()
    probe = take(model, batches, n=10)
    assert probe.inputs["input_ids"].shape == (10, 6)
    assert set(probe.inputs["input_ids"][8, 2:].tolist()) == {7}
    assert probe.inputs["attention_mask"].sum() == 3 * 4 - 1 + 6 * 4 - 1 + 2 * 2 - 1
    outputs = torch.cat([model(**batch) for batch in batches])[:10]
    other = Bag()
    moved = torch.cat([other(**batch) for batch in batches])[:10]
    found = measure(other, probe, CPU)
    close(found.divergence, math.fsum(map(divergence, outputs.tolist(), moved.tolist())) / 10)
    no_mask = [(torch.randint(0, 9, (2, n)),) for n in (3, 4)]
    with pytest.raises(DataError, match="do not go into one probe: .* need an attention_mask"):
        take(nn.Embedding(9, 5), no_mask, "gaussian")


def test_tokens_of_several_lengths():
    """Neither labels that are ignored nor, without labels, what fills up counts."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(20, 20)

        def forward(self, input_ids, attention_mask):
            return self.embedding(input_ids)

    model = Tokens()
    plain = list(text_batches())
    probe = take(model, plain, "per-token")
    assert probe.counted.sum() == sum(int(batch["attention_mask"].sum()) for batch in plain) == len(probe.outputs)
    labelled = [(batch, torch.where(batch["attention_mask"] == 1, batch["input_ids"], IGNORED)) for batch in plain]
    labelled[0][1][1] = IGNORED
    fewer = take(model, labelled, "per-token")
    assert len(probe.outputs) - len(fewer.outputs) == 3
    assert measure(model, fewer, CPU).unchanged == 1
    wrong = [(batch, labels[:, :1]) for batch, labels in labelled[:1]]
    with pytest.raises(DataError, match="the per-token likelihood needs integers of shape"):
        take(model, wrong, "per-token")


class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.full((4,), float(n)), n % 3) for n in range(30))


def test_streams_and_loaders_give_their_first():
    model = nn.Linear(4, 3)
    for data in (Stream(), DataLoader(Stream(), 4), [(torch.full((4, 4), float(4 * n)), None) for n in range(9)]):
        assert take(model, data, n=9).inputs.shape == (9, 4)
    assert take(model, Stream(), n=9).inputs[:, 0].tolist() == list(range(9))
    assert take(model, DataLoader(Stream(), 4), n=9).inputs[:, 0].tolist() == list(range(9))
    assert take(model, Stream(), n=99).samples == 30
    nothing = BoundDomain(as_domain([]), InputSpec((4,), False, False), get_likelihood("categorical"), (3,))
    with pytest.raises(DataError, match="has no samples"):
        take_probe(model, nothing, 5, 0, CPU)


# The file


@pytest.fixture
def probed(tmp_path):
    torch.manual_seed(0)
    return ewc.consolidate(MLP(4, 8, 3), OLD, probe=20, output=tmp_path / "a.safetensors")


def equal(one, other):
    assert one.record == other.record
    assert set(one.tensors) == set(other.tensors)
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name])


def test_round_trip(probed, tmp_path):
    opened, loaded = Anchor.open(probed.path), Anchor.load(probed.path)
    assert isinstance(opened.probes, ProbeFile)
    assert loaded.provenance == probed.provenance
    assert loaded.provenance.probes == [probed.probes[0].record]
    for anchor in (opened, loaded):
        (found,) = anchor.probes
        equal(found, probed.probes[0])
        again = anchor.save(tmp_path / "b.safetensors")
        assert again.digest == probed.digest
    assert opened.probes[-1].samples == 20
    assert [p.samples for p in opened.probes[:]] == [20]
    with pytest.raises(IndexError):
        opened.probes[1]


def test_dictionaries_and_tokens_round_trip(probed, tmp_path):
    texts = take(Bag(), list(text_batches()), n=10)
    tokens = take(Table(randn(4, 5, 6)), TensorDataset(torch.arange(4)[:, None]), "per-token", active=(0, 2))
    kept = [probed.probes[0], texts, tokens]
    path = Anchor(**{**vars(probed), "probes": kept}).save(tmp_path / "b.safetensors").path
    for one, other in zip(kept, Anchor.open(path).probes, strict=True):
        equal(one, other)
    with safe_open(path, "pt") as file:
        assert {"probe.1.inputs.input_ids", "probe.2.counted"} <= set(file.keys())


def test_opening_reads_no_probe(probed, monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr("ewc_finetune.storage.lazy_tensors.TensorFile.__getitem__", never)
    assert len(Anchor.open(probed.path).probes) == 1
    assert ewc.inspect(probed.path).probes[0]["samples"] == 20


def test_an_anchor_without_probes_is_what_it_was(probed, tmp_path):
    plain = Anchor.open(probed.path).without_probes().save(tmp_path / "b.safetensors")
    torch.manual_seed(0)
    never = ewc.consolidate(MLP(4, 8, 3), OLD, output=tmp_path / "c.safetensors")
    assert plain.digest == never.digest  # and so the probe has no part in the Fisher
    assert "probes" not in record_of(plain.path)
    assert not any(name.startswith("probe") for name in load_file(plain.path))
    assert Anchor.load(plain.path).probes == ()
    assert not Anchor.open(plain.path).probes


def tamper(path, tensors=(), record=None, probes=None):
    """Change tensors (None takes one away) and the record of the probe behind the package's back."""
    known = {**load_file(path), **dict(tensors)}
    provenance = record_of(path)
    if probes is not None:
        provenance["probes"] = probes
    elif record is not None:
        provenance["probes"][0].update(record)
    metadata = {"format": "ewc-anchor", "format_version": "1", "anchor": json.dumps(provenance)}
    save_changed({name: tensor for name, tensor in known.items() if tensor is not None}, path, metadata)


@pytest.mark.parametrize(
    ("tensors", "record", "message"),
    [
        (
            {"probe.0.outputs": torch.zeros(19, 3)},
            None,
            r"probe\.0\.outputs has shape \(19, 3\); expected \(20, \.\.\.\)",
        ),
        ({"probe.0.outputs": torch.zeros(())}, None, r"probe\.0\.outputs has shape \(\)"),
        ({"probe.0.outputs": None}, None, r"probe\.0\.outputs is missing"),
        (
            {"probe.0.inputs": torch.zeros(20, 4, 2)},
            None,
            r"probe\.0\.inputs has shape \(20, 4, 2\); expected \(20, 4\)",
        ),
        ({"probe.0.inputs": None, "probe.0.inputs.x": torch.zeros(20, 4)}, None, r"probe\.0\.inputs is missing"),
        ({"probe.0.counted": torch.ones(20, 1)}, None, r"probe\.0\.counted is there, and should not be"),
        ({"probe.1.outputs": torch.ones(1, 1)}, None, r"probe\.1\.outputs belongs to no probe"),
        ({"probe.x": torch.ones(1, 1)}, None, r"probe\.x belongs to no probe"),
        ({}, {"samples": 10**9}, r"expected \(1000000000, 4\)"),
        ({}, {"samples": 0}, "is of 0 samples"),
        ({}, {"samples": -20}, "in the metadata, probes is .*samples"),
        ({}, {"samples": 10**400}, "in the metadata, probes is .*samples"),
        ({}, {"samples": True}, "in the metadata, probes is"),
        ({}, {"likelihood": "poisson"}, "probes is .*expected a list of objects, .*a likelihood .categorical"),
        ({}, {"likelihood": "per-token"}, r"probe\.0\.counted is missing"),
        ({}, {"layout": {"shape": [4]}}, "probes is"),
        ({}, {"layout": {"shape": "4", "flat": False, "bytes_to_unit": False}}, "probes is"),
        ({}, {"layout": {"shape": [], "flat": False, "bytes_to_unit": False, "names": {"x": -1}}}, "probes is"),
        ({}, {"active": [0, 1]}, r"outputs has shape \(20, 3\), and 2 outputs are active"),
        ({}, {"active": [2, 1, 0]}, "probes is"),
        ({}, {"active": [0, 1, -2]}, "probes is"),
        ({}, {"active": []}, "probes is"),
        ({}, {"data": 5}, "probes is"),
        ({}, {"split": 5}, "probes is"),
        ({}, {"seed": "x"}, "probes is"),
    ],
)
def test_files_that_were_tampered_with(probed, tensors, record, message):
    tamper(probed.path, tensors, record)
    with pytest.raises(AnchorError, match=message):
        Anchor.open(probed.path)


@pytest.mark.parametrize("probes", [{}, [5], "x", [None], [{}]])
def test_records_that_are_none(probed, probes):
    tamper(probed.path, probes=probes)
    with pytest.raises(AnchorError, match="probes is"):
        Anchor.open(probed.path)


@pytest.mark.parametrize(
    ("name", "tensor", "error", "message"),
    [
        ("outputs", torch.full((20, 3), torch.nan), NonFiniteError, r"probe\.0\.outputs holds NaN"),
        ("outputs", torch.full((20, 3), -torch.inf), NonFiniteError, r"probe\.0\.outputs holds NaN or infinity"),
        ("inputs", torch.full((20, 4), torch.nan), NonFiniteError, r"probe\.0\.inputs holds NaN"),
        ("outputs", torch.ones(20, 3, dtype=torch.long), AnchorError, r"probe\.0\.outputs has type torch\.int64"),
    ],
)
def test_numbers_that_were_tampered_with(probed, name, tensor, error, message):
    """They are found when they are read."""
    tamper(probed.path, {f"probe.0.{name}": tensor})
    opened = Anchor.open(probed.path)
    with pytest.raises(error, match=message):
        opened.probes[0]
    with pytest.raises(error, match=message):
        Anchor.load(probed.path)
    with pytest.raises(error, match=message):
        opened.save(probed.path.with_name("never.safetensors"))


def test_counted_tokens_that_were_tampered_with(probed, tmp_path):
    tokens = take(Table(randn(4, 5, 6)), TensorDataset(torch.arange(4)[:, None]), "per-token")
    path = Anchor(**{**vars(probed), "probes": [tokens]}).save(tmp_path / "b.safetensors").path
    for counted, message in [
        (torch.zeros(4, 5, dtype=torch.bool), "0 tokens count, and there are outputs for 20"),
        (torch.ones(4, 5), r"probe\.0\.counted has type torch\.float32; expected bool"),
    ]:
        tamper(path, {"probe.0.counted": counted})
        with pytest.raises(AnchorError, match=message):
            Anchor.load(path)
    tamper(path, {"probe.0.counted": torch.ones(3, 5, dtype=torch.bool)})
    with pytest.raises(AnchorError, match=r"counted has shape \(3, 5\); expected \(4, tokens\)"):
        Anchor.open(path)


# consolidate


@pytest.mark.parametrize(
    "options",
    [
        {"curvature": "identity"},
        {"samples": 30},
        {"samples": "auto"},
        {"curvature": "kfac"},
        {"estimator": "sampled", "exclude": ["head.*"]},
    ],
)
def test_consolidate_keeps_a_probe_beside_any_curvature(options):
    model, notes = MLP(4, 8, 3), Notes()
    anchor = ewc.consolidate(model, OLD, probe=16, progress=notes, **options)
    assert "the anchor holds 16 samples of data as they are, and the model's answers to them (224 bytes)" in str(notes)
    (found,) = meters(model, [anchor])
    assert found.read(model, CPU).divergence < 1e-5
    assert found.read(model, CPU).anchor == "anchor 'data'"


def test_consolidate_takes_what_there_is():
    notes = Notes()
    anchor = ewc.consolidate(MLP(4, 8, 3), OLD, probe=1000, progress=notes)
    assert anchor.probes[0].samples == 120
    assert "data has 120 samples, and all are kept: fewer than the 1,000 of the probe" in str(notes)
    assert ewc.consolidate(MLP(4, 8, 3), OLD).probes == ()


@pytest.mark.parametrize("n", [-1, 2.5, "many", True, None])
def test_numbers_that_are_none(n):
    with pytest.raises(UsageError, match="probe is .*; expected a whole number of inputs"):
        ewc.consolidate(MLP(4, 8, 3), OLD, probe=n)


def test_whose_outputs_count(tmp_path):
    inputs, labels = OLD.tensors
    np.savez(tmp_path / "d.npz", x=inputs.numpy(), y=labels.numpy())
    anchor = ewc.consolidate(MLP(4, 8, 3), f"npz:{tmp_path / 'd.npz'}?classes=1,2&active=1,2", probe=8)
    (probe,) = anchor.probes
    assert probe.active == (1, 2)
    assert probe.outputs.shape == (8, 2)


@pytest.mark.parametrize(("make", "task"), [(bert, "reviews"), (llama, "corpus"), (masked, "corpus")])
def test_models_of_transformers(make, task, tmp_path):
    folder = saved(make(), tmp_path / "model")
    data = reviews(tmp_path / "r.jsonl") if task == "reviews" else corpus(tmp_path / "c.txt")
    anchor = ewc.consolidate(folder, data, probe=8, estimator="sampled", output=tmp_path / "a.safetensors")
    (probe,) = Anchor.open(tmp_path / "a.safetensors").probes
    assert set(probe.inputs) == {"input_ids", "attention_mask"}
    assert not probe.inputs["input_ids"].is_floating_point()
    assert (probe.counted is None) == (task == "reviews")
    model = make()
    (meter,) = meters(model, [anchor])
    assert meter.read(model, CPU, 3).divergence < 1e-5
    assert meter.read(model, CPU, 3).unchanged == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    assert meter.read(model, CPU).divergence > 1e-3


def test_a_stream_of_texts(tmp_path):
    folder = saved(bert(), tmp_path / "model")
    data = reviews(tmp_path / "r.jsonl", labels=(0, 1, 2)) + "?stream=1"
    notes = Notes()
    anchor = ewc.consolidate(folder, data, probe=50, progress=notes)
    assert anchor.probes[0].samples == 12
    assert "fewer than the 50" in str(notes)


# Other heads


def test_the_head_of_the_anchor_takes_its_place():
    torch.manual_seed(0)
    model = MLP(4, 16, 3)
    ewc.finetune(model, OLD, norm_stats="update", epochs=10, lr=0.01, eval_on=[])
    anchor = ewc.consolidate(model, OLD, probe=50)
    before = copy.deepcopy(model)
    two = TensorDataset(NEW.tensors[0], NEW.tensors[1] % 2)
    done = ewc.finetune(model, two, anchors=anchor, lambdas=0.1, head="new", epochs=9, lr=0.01, eval_on=[])
    (meter,) = meters(model, [anchor], done.head)
    assert meter.head.out_features == 3
    model.train()
    parameters, state = list(model.parameters()), torch.get_rng_state()
    found = meter.read(model, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert model.training
    assert model.head.out_features == 2
    inputs = anchor.probes[0].inputs.float()
    with torch.no_grad():
        old, new = before.eval()(inputs), copy.deepcopy(model).eval()
        new.head = before.head
        new = new(inputs)
    close(found.divergence, math.fsum(map(divergence, old.tolist(), new.tolist())) / 50)
    assert found.divergence > 1e-2
    half = copy.deepcopy(model).half()
    assert meter.read(half, CPU).divergence == pytest.approx(found.divergence, rel=0.1)
    assert half.head.weight.dtype == torch.float16
    assert meter.read(model, CPU) == found
    (wrong,) = meters(model, [anchor])
    with pytest.raises(AnchorMismatchError, match="from another model, or from one with another head"):
        wrong.read(model, CPU)


def test_expanded_heads_are_measured_as_they_are():
    torch.manual_seed(0)
    model = MLP(4, 16, 3)
    anchor = ewc.consolidate(model, OLD, probe=50)
    more = TensorDataset(NEW.tensors[0], NEW.tensors[1] + 2)
    done = ewc.finetune(model, more, anchors=anchor, head="expand", epochs=1, eval_on=[])
    (meter,) = meters(model, [anchor], done.head)
    assert meter.head is None
    assert meter.read(model, CPU).divergence > 0.1


# merge, inspect and the command line


def test_a_merged_anchor_has_the_probes_of_all(probed, tmp_path):
    torch.manual_seed(1)
    other = ewc.consolidate(MLP(4, 8, 3), NEW, name="new", probe=10, output=tmp_path / "b.safetensors")
    notes, digests = Notes(), set()
    for path in ("m.safetensors", "n.safetensors"):
        merged = ewc.merge([probed.path, other.path], output=tmp_path / path, progress=notes)
        digests.add(merged.digest)
    assert len(digests) == 1
    for one, found in zip([*probed.probes, *other.probes], Anchor.open(merged.path).probes, strict=True):
        equal(one, found)
    assert "the merged anchor holds 10 samples of data as they are" in str(notes)
    assert all("probes" not in parent["provenance"] for parent in merged.provenance.merged["parents"])
    twice = ewc.merge([merged, ewc.consolidate(MLP(4, 8, 3), NEW)], online=True)
    assert [probe.samples for probe in twice.probes] == [20, 10]
    bare = ewc.merge([probed.path, other.path], probes=False, output=tmp_path / "bare.safetensors")
    assert bare.probes == ()
    assert bare.provenance.probes == []
    plain = ewc.merge([probed.without_probes(), other.without_probes()])
    assert bare.provenance.merged["parents"][0]["provenance"] == plain.provenance.merged["parents"][0]["provenance"]


def test_a_probe_whose_head_is_gone_is_left_out(probed, tmp_path):
    torch.manual_seed(0)
    model = MLP(4, 8, 3)
    done = ewc.finetune(model, NEW, anchors=probed, head="new", epochs=1, eval_on=[])
    new = ewc.consolidate(model, NEW, name="new", probe=10, head=done.head, lineage=done.lineage)
    notes = Notes()
    merged = ewc.merge([probed, new], progress=notes)
    assert [probe.samples for probe in merged.probes] == [10]
    assert "a.safetensors holds 20 samples of data as they are" in str(notes)
    assert "they are left out, for the merged anchor has another last layer" in str(notes)
    assert foreign_head(probed, merged.provenance.head)


@pytest.mark.parametrize("curvature", ["diagonal", "kfac"])
def test_taking_the_probes_out_changes_nothing_else(curvature, tmp_path, ewc_ft):
    torch.manual_seed(0)
    ewc.consolidate(MLP(4, 8, 3), OLD, probe=20, curvature=curvature, output=tmp_path / "a.safetensors")
    found = ewc_ft("merge", "a.safetensors", "-o", "b.safetensors", "--no-probes")
    assert "samples of data" not in found.stderr
    before, after = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert set(before) - set(after) == {"probe.0.inputs", "probe.0.outputs"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_the_command_line_says_what_it_keeps(tmp_path, ewc_ft):
    inputs, labels = OLD.tensors
    rows = [",".join(map(str, [*x.tolist(), y])) for x, y in zip(inputs, labels.tolist(), strict=True)]
    (tmp_path / "t.csv").write_text("a,b,c,d,label\n" + "\n".join(rows))
    model = "mlp?in_features=4&hidden=8&num_classes=3"
    ewc_ft("finetune", "--model", model, "--data", "csv:t.csv", "--epochs", 1, "--output", "m.pt")
    command = ("consolidate", "m.pt", "--data", "csv:t.csv", "--probe", 30)
    held = (
        "the anchor holds 30 samples of csv:t.csv as they are, and the model's answers to them (420 bytes): whoever has"
    )
    assert held in ewc_ft(*command, "--dry-run").stderr
    assert not (tmp_path / "m.anchor.safetensors").exists()
    found = ewc_ft(*command, "--json")
    assert held in found.stderr
    assert json.loads(found.stdout)["provenance"]["probes"][0]["samples"] == 30
    facts = ewc_ft("inspect", "m.anchor.safetensors", "--json")
    assert "probe          30 samples of csv:t.csv as they are" in facts.stderr
    (probe,) = json.loads(facts.stdout)["probes"]
    assert (probe["samples"], probe["data"]) == (30, "csv:t.csv")
    assert probe["bytes"] == 30 * (4 + 3) * 2 == json.loads(facts.stdout)["tensors"]["probe"]["bytes"]
    ewc_ft("consolidate", "m.pt", "--data", "csv:t.csv", "--probe", -1, expect=2)
    ewc_ft("consolidate", "m.pt", "--data", "csv:t.csv", "--output", "plain.safetensors")
    assert "probe" not in ewc_ft("inspect", "plain.safetensors").stderr
    assert json.loads(ewc_ft("inspect", "plain.safetensors", "--json").stdout)["probes"] == []
    ewc_ft("finetune", "--anchors", "m.anchor.safetensors", "--data", "csv:t.csv", "--epochs", 1)
    assert (
        held.replace("the anchor", "the merged anchor")
        in ewc_ft("merge", "m.anchor.safetensors", "plain.safetensors", "-o", "both.safetensors").stderr
    )
