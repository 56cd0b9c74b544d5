"""What a run will need is found without doing it."""

import json

import pytest
import torch
from support.domains import noise
from support.models import Small, trained

import ewc_finetune as ewc
from ewc_finetune.errors import StorageError, UsageError


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("curvature", ["diagonal", "kfac", "identity"])
def test_consolidation(tmp_path, curvature):
    model = trained(Small(), torch.float32)
    before, state = state_of(model), torch.get_rng_state()
    options = {"curvature": curvature, "batch_size": 10, "output": tmp_path / "a.safetensors"}
    samples = {} if curvature == "identity" else {"samples": 35}
    found = ewc.dry_run(ewc.consolidate, model, noise(), **samples, **options)
    assert found.work == {"samples": samples.get("samples", 0)}
    assert found.files == (tmp_path / "a.safetensors",)
    assert found.seconds > 0
    assert found.memory["host"] > 50e6
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert ewc.dry_run(ewc.consolidate, model, noise(), samples="auto", batch_size=10).seconds is None


@pytest.mark.parametrize("norm_stats", ["frozen", "update"])
def test_finetuning(tmp_path, norm_stats):
    """The model is as it was, and a run after it is what it would have been."""
    model = trained(Small(), torch.float32)
    anchor = ewc.consolidate(model, noise())
    before = state_of(model)
    gradients = [torch.ones_like(p) for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    model.norm.register_buffer("seen", torch.zeros(6), persistent=False)

    def see(norm, _, output):
        norm.seen += output.detach().mean(0)

    hook = model.norm.register_forward_hook(see)
    options = {"anchors": anchor, "lr": 0.1, "batch_size": 10, "norm_stats": norm_stats, "eval_on": [noise()]}
    found = ewc.dry_run(ewc.finetune, model, noise(), epochs=5, output=tmp_path / "m.pt", **options)
    assert found.work == {"steps": 20}
    assert found.files == (tmp_path / "m.pt", tmp_path / "m.run")
    assert found.seconds > 0
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(model.norm.seen, torch.zeros(6))
    assert not model.training
    hook.remove()
    for parameter in model.parameters():
        parameter.grad = None
    untouched = trained(Small(), torch.float32)
    for one in (model, untouched):
        ewc.finetune(one, noise(), epochs=1, **options)
    for name, tensor in untouched.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


class Counted:
    """Counts the samples that go through a model."""

    def __init__(self, model):
        self.seen = 0
        model.register_forward_pre_hook(self)

    def __call__(self, module, inputs):
        self.seen += len(inputs[0])


@pytest.mark.parametrize("curvature", ["diagonal", "kfac"])
@pytest.mark.parametrize("options", [{}, {"samples": 15}, {"samples": "auto", "rtol": 0.5}], ids=str)
@pytest.mark.parametrize("size", [7, 20, 30, 50, 120, 400])
def test_no_more_is_tried_than_done_when_consolidating(size, options, curvature):
    seen = []
    for verb in (ewc.consolidate, lambda *given, **more: ewc.dry_run(ewc.consolidate, *given, **more)):
        model = trained(Small(), torch.float32)
        counted = Counted(model)
        verb(model, noise(size), batch_size=10, curvature=curvature, **options)
        seen.append(counted.seen)
    assert seen[1] <= seen[0]


@pytest.mark.parametrize("size", [7, 20, 50])
def test_no_more_is_tried_than_done_when_fine_tuning(size):
    seen = []
    for verb in (ewc.finetune, lambda *given, **more: ewc.dry_run(ewc.finetune, *given, **more)):
        model = trained(Small(), torch.float32)
        counted = Counted(model)
        verb(model, noise(size), batch_size=10, epochs=1, eval_on=[noise(size)])
        seen.append(counted.seen)
    assert seen[1] <= seen[0]


def test_what_a_short_pass_takes_is_estimated_from_one_batch():
    model = trained(Small(), torch.float32)
    for size in (7, 30, 60, 300):
        found = ewc.dry_run(ewc.consolidate, model, noise(size), batch_size=10)
        assert found.work == {"samples": size}
        assert 0 < found.seconds < 60


def test_a_new_head_is_taken_off_again():
    model = trained(Small(), torch.float32)
    head = model.last
    found = ewc.dry_run(ewc.finetune, model, noise(), head="new", eval_on=[])
    assert found.work == {"steps": 4}
    assert model.last is head


def test_data_without_a_length():
    batches = [(torch.randn(5, 4), torch.arange(5) % 3)] * 4

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return zip(*noise().tensors, strict=True)

    model = trained(Small(), torch.float32)
    assert ewc.dry_run(ewc.finetune, model, batches, epochs=3, eval_on=[]).work == {"steps": 12}
    found = ewc.dry_run(ewc.finetune, model, Stream(), eval_on=[])
    assert (found.work, found.seconds) == ({"steps": None}, None)
    assert ("time", "not known beforehand") in found.facts


def test_what_would_go_wrong_is_said(tmp_path):
    model = trained(Small(), torch.float32)
    (tmp_path / "m.run").mkdir()
    with pytest.raises(StorageError, match="the run folder .* exists"):
        ewc.dry_run(ewc.finetune, model, noise(), output=tmp_path / "m.pt")
    with pytest.raises(UsageError, match="draws is 0"):
        ewc.dry_run(ewc.consolidate, model, noise(), draws=0)


def test_the_command_line(ewc_ft, tmp_path):
    ewc_ft("finetune", "--model", "mlp?hidden=8", "--data", "digits", "-o", "m.pt", "--epochs", 1)
    result = ewc_ft("consolidate", "m.pt", "--data", "digits?limit=100", "--dry-run", "--json")
    assert json.loads(result.stdout)["files"] == ["m.anchor.safetensors"]
    assert "memory (host)" in result.stderr
    assert "samples        100" in result.stderr
    assert not (tmp_path / "m.anchor.safetensors").exists()
    ewc_ft("consolidate", "m.pt", "--data", "digits?limit=100")
    result = ewc_ft("finetune", "--anchors", "m.anchor.safetensors", "--data", "digits?rotate=90", "--dry-run")
    assert "file           m-digits-rotate-90.pt" in result.stderr
    assert "file           m-digits-rotate-90.run" in result.stderr
    auto = ("--lambda", "auto", "--dry-run")
    result = ewc_ft("finetune", "--anchors", "m.anchor.safetensors", "--data", "digits?rotate=90", *auto)
    assert "exact Fisher of 100 samples, a lambda to be looked for" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.anchor.safetensors", "m.pt", "m.run"]
