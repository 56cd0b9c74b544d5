"""Models and optimizers that something wraps; and what a notebook shows of our objects."""

import pytest
import torch
from support.models import Small, trained
from torch import nn

import ewc_finetune as ewc
from ewc_finetune import Penalty
from ewc_finetune.checkpoint.formats.program import silent
from ewc_finetune.checkpoint.formats.torchscript import TorchScript
from ewc_finetune.checkpoint.open import load_checkpoint
from ewc_finetune.errors import AnchorMismatchError, StorageError, UsageError
from ewc_finetune.modules.wrappers import fitting, prefixes, unwrapped, without

# Of torch's own: its wrapper of a model that is compiled, which compiles nothing before it is called.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Lightning(nn.Module):
    """As trainers keep a model: beside things of their own."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.extra = nn.Parameter(torch.ones(2))


WRAPPERS = {
    "none": lambda model: model,
    "DataParallel": nn.DataParallel,
    "compile": torch.compile,
    "both": lambda model: nn.DataParallel(torch.compile(model)),
    "a trainer's": Lightning,
}


@pytest.fixture
def anchor(small, samples):
    return ewc.consolidate(small, samples, name="old")


@pytest.mark.parametrize("form", ["gradient", "proximal"])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_a_wrapped_model_is_held_as_the_one_within(anchor, wrap, form):
    found = []
    for around in (WRAPPERS["none"], wrap):
        model = trained(Small(), seed=3)
        wrapped = around(model)
        penalty = Penalty(wrapped, anchor, 10.0, form)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        penalty.attach(optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
    assert penalty.free == (("extra",) if wrap is Lightning else ())


def test_another_model_is_still_refused(anchor):
    with pytest.raises(AnchorMismatchError, match="which the model does not have"):
        Penalty(nn.DataParallel(nn.Linear(2, 2)), anchor, 1.0)


def test_prefixes():
    names = ["module._orig_mod.a", "module._orig_mod.b", "model.a", "c"]
    assert list(prefixes(names)) == ["", "module.", "module._orig_mod.", "model."]
    named = dict.fromkeys(names, 1)
    assert fitting(named, {"a", "b"}) == "module._orig_mod."
    assert fitting(named, {"z"}) == ""
    assert without(named, "model.") == {"a": 1}


@pytest.mark.parametrize("wrap", ["DataParallel", "compile", "both"])
def test_the_verbs_take_the_model_within(wrap, small, samples, anchor):
    wrapped = WRAPPERS[wrap](small)
    assert unwrapped(wrapped) is small
    made = ewc.consolidate(wrapped, samples, name="old")
    assert made.fisher.keys() == anchor.fisher.keys()
    assert all(torch.equal(made.fisher[name], anchor.fisher[name]) for name in made.fisher)
    done = ewc.finetune(wrapped, samples, anchors=made, epochs=1, eval_on=[samples], batch_size=5)
    assert done.model is small
    assert done.after[0].loss == pytest.approx(ewc.evaluate(wrapped, [samples])[0].loss, rel=1e-12)


class Accelerated(torch.optim.Optimizer):
    """Of the shape of Accelerate's: no hooks of its own, and steps that are left out while gradients accumulate."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.sync = True

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure=None):
        if self.sync:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none=None):
        if self.sync:
            self.optimizer.zero_grad()


@pytest.mark.parametrize("form", ["gradient", "proximal"])
def test_accelerates_optimizer(anchor, form):
    """Two micro-batches to a step, of which the first one does not step: as one of both by hand."""
    found = []
    for accelerated in (True, False):
        model = trained(Small(), seed=3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        outer = Accelerated(optimizer) if accelerated else optimizer
        handle = Penalty(model, anchor, 10.0, form).attach(outer)
        for _ in range(3):
            for sync in (False, True):
                model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
                if accelerated:
                    outer.sync = sync
                if accelerated or sync:
                    outer.step()
                    outer.zero_grad()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
        handle.remove()
    assert all(map(torch.equal, *found))


def test_an_optimizer_is_attached_to_once_however_it_is_wrapped(anchor, small):
    penalty, optimizer = Penalty(small, anchor, 1.0), torch.optim.SGD(small.parameters(), lr=0.1)
    penalty.attach(Accelerated(Accelerated(optimizer)))
    with pytest.raises(UsageError, match="attached to this optimizer already"):
        penalty.attach(optimizer)


def test_what_is_no_optimizer_is_refused(anchor, small):
    for wrong in (object(), Accelerated(None), small):
        with pytest.raises(UsageError, match=r"does not tell of its steps .* add_gradient\(\) before each step"):
            Penalty(small, anchor, 1.0).attach(wrong)


def test_each_shows_itself_in_one_line(anchor, small, samples, tmp_path):
    path = tmp_path / "a.safetensors"
    saved = ewc.consolidate(small, samples, name="old", curvature="kfac", probe=3, output=path)
    done = ewc.finetune(small, samples, anchors=saved, epochs=1, eval_on=[samples], output=tmp_path / "o.pt")
    shown = {
        repr(anchor): "<Anchor 'old': diagonal, 15 samples, holds 63 of 63 weights in 6 tensors>",
        repr(saved): "<Anchor 'old': kfac, 15 samples, holds 63 of 63 weights in 6 tensors, 2 K-FAC blocks, 1 probe, "
        f"{path}>",
        repr(Penalty(small, anchor, 1.0)): "<Penalty of 'old': gradient form, 63 parameters one by one>",
        repr(saved.probes[0]): "<Probe of 'data': 3 samples, categorical, ",
        repr(done): "<Finetuned Small: 1 step, data ",
        repr(ewc.inspect(path)): f"<Inspection of '{path}': 'old', {path.stat().st_size:,} bytes, ",
    }
    for text, start in shown.items():
        assert text.startswith(start)
        assert "\n" not in text
        assert len(text) < 300


def save_script(model, path):
    with silent():
        torch.jit.save(torch.jit.trace(model, torch.ones(2, 4, dtype=torch.float64)), path)


@pytest.mark.parametrize("keep", ["last", "best"])
@pytest.mark.parametrize("error", [RuntimeError("could not be written\nat all"), StorageError("no place")])
def test_what_was_trained_is_kept_if_it_cannot_be_written(small, samples, tmp_path, monkeypatch, keep, error):
    """As TorchScript may refuse to write what it has read: another format, by itself, is always there."""
    save_script(small, tmp_path / "m.pt")

    def write(*_):
        raise error

    monkeypatch.setattr(TorchScript, "write", write)
    options = {"epochs": 2, "keep": keep, "eval_on": [samples], "select_on": [samples], "batch_size": 5}
    options |= {"lr": 50.0 if keep == "best" else 0.1}  # after which the first state is the best
    with pytest.raises(
        StorageError, match=r"the model is trained, and .*Its weights are kept as a state dict: "
    ) as found:
        ewc.finetune(tmp_path / "m.pt", samples, output=tmp_path / "o.pt", **options)
    kept = torch.load(str(found.value).rpartition(": ")[2], weights_only=True)
    monkeypatch.undo()
    ewc.finetune(tmp_path / "m.pt", samples, output=tmp_path / "other.pt", **options)
    expected = load_checkpoint(tmp_path / "other.pt").module.state_dict()
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in kept)


def test_a_state_that_was_never_evaluated_is_kept_too(small, samples, tmp_path, monkeypatch):
    save_script(small, tmp_path / "m.pt")
    monkeypatch.setattr(TorchScript, "write", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(StorageError, match="Its weights are kept as a state dict: .*last.pt"):
        ewc.finetune(tmp_path / "m.pt", samples, output=tmp_path / "o.pt", epochs=0, eval_on=[])
    assert torch.load(tmp_path / "o.run" / "last.pt", weights_only=True)
