"""A run that did harm says so, a start that nothing bettered is kept, and a short run has a log too."""

import functools
import json

import pytest
import torch
from support.domains import corners
from support.models import Small, trained
from support.notes import Notes
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune.checkpoint.checkpoint import cpu_state
from ewc_finetune.checkpoint.formats.safetensors_file import RECORD
from ewc_finetune.checkpoint.formats.state_dict import save_state_dict
from ewc_finetune.checkpoint.open import open_fresh, open_model
from ewc_finetune.data.domain import as_domain
from ewc_finetune.finetuning.schedule import Schedule
from ewc_finetune.finetuning.training_loss import training_loss
from ewc_finetune.storage.lazy_tensors import write_tensors

blobs = functools.partial(corners, noise=0.3)


def lines(*losses):
    return [{"step": n, "loss": loss} for n, loss in enumerate(losses, 1)]


def test_the_end_is_the_last_quarter_and_batches_may_differ():
    found = training_loss([{"step": 0, "scores": {}}, *lines(2.0, 9.0, 9.0, 9.0, 9.0, 9.0, 3.0, 5.0)])
    assert (found.began, found.ended, found.worse) == (2.0, 4.0, True)
    assert not training_loss(lines(2.0, 2.2)).worse
    assert training_loss(lines(2.0, 2.3)).worse
    assert not training_loss(lines(0.01, 0.05)).worse  # mastered before; one batch is like no other
    assert not training_loss(lines(5.0)).worse
    assert training_loss([]) is None


def test_a_run_that_ends_worse_than_it_began_says_so_and_is_written(tmp_path):
    notes = Notes()
    done = ewc.finetune(
        trained(Small(), torch.float32), blobs(), lr=100.0, epochs=5, batch_size=20, eval_on=[], progress=notes,
        output=tmp_path / "m.pt", architecture="x:Y",
    )  # fmt: skip
    assert done.training_loss.worse
    assert done.training_loss.ended > 10 * done.training_loss.began
    (warning,) = notes.about("warning: the training loss ended worse than it began")
    assert "--keep best keeps the best state, the start among them. Try a lower --lr" in warning
    assert "--lambda" not in warning
    anchor = ewc.consolidate(trained(Small(), torch.float32), blobs())
    options = {"anchors": anchor, "lr": 100.0, "epochs": 5, "batch_size": 20, "eval_on": []}
    ewc.finetune(trained(Small(), torch.float32), blobs(), lambdas=0.0, progress=(plain := Notes()), **options)
    assert "--lambda" not in plain.about("warning: the training loss ended worse")[0]
    assert json.loads((done.run / "run.json").read_text())["training_loss"] == vars(done.training_loss)
    assert (tmp_path / "m.pt").exists()
    good = ewc.finetune(trained(Small(), torch.float32), blobs(), lr=1e-2, eval_on=[], progress=(quiet := Notes()))
    assert not good.training_loss.worse
    assert not quiet.about("warning")
    assert ewc.finetune(trained(Small(), torch.float32), blobs(), epochs=0, eval_on=[]).training_loss is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("written", [True, False])
def test_the_start_is_kept_where_nothing_is_better(tmp_path, written, dtype):
    model, notes = trained(Small(), torch.float32), Notes()
    ewc.finetune(model, blobs(), epochs=60, lr=5e-2, eval_on=[])
    model = model.to(dtype)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    where = {"output": tmp_path / "m.pt", "architecture": "x:Y"} if written else {}
    done = ewc.finetune(
        model, blobs(), lr=100.0, epochs=3, batch_size=20, keep="best", eval_on=[],
        select_on=[as_domain(blobs(), "new")], progress=notes, **where,
    )  # fmt: skip
    assert (done.step, done.steps) == (0, 9)
    assert done.after == done.before
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
    assert notes.about("no evaluation was better than the one before the first step: the start is kept")
    assert notes.about("What is kept is the state of step 0, the best by its score")
    if written:
        kept = torch.load(tmp_path / "m.pt", weights_only=True)
        assert all(torch.equal(kept[name], tensor) for name, tensor in start.items())
        assert sorted(path.name for path in done.run.glob("*.pt")) == ["last.pt"]


def test_patience_counts_from_the_start():
    model = trained(Small(), torch.float32)
    ewc.finetune(model, blobs(), epochs=60, lr=5e-2, eval_on=[])
    done = ewc.finetune(
        model, blobs(), lr=100.0, epochs=9, batch_size=20, patience=2, eval_on=[], select_on=[as_domain(blobs(), "new")]
    )
    assert (done.step, done.steps) == (0, 6)


@pytest.mark.parametrize(("total", "every"), [(1, 1), (19, 1), (39, 1), (40, 2), (999, 49), (1000, 50), (10**6, 50)])
def test_a_log_has_twenty_lines_where_there_are_as_many_steps(total, every):
    assert Schedule().logged_every(total) == every
    assert total // every >= min(total, 20)
    assert Schedule(log_every=7).logged_every(total) == 7
    assert Schedule().logged_every(None) == 50


def test_a_short_run_is_seen_in_its_log():
    done = ewc.finetune(trained(Small(), torch.float32), blobs(), epochs=10, batch_size=20, eval_on=[])
    assert [line["step"] for line in done.history if "loss" in line] == list(range(1, 31))
    told = ewc.finetune(trained(Small(), torch.float32), blobs(), epochs=10, batch_size=20, eval_on=[], log_every=50)
    assert [line["step"] for line in told.history if "loss" in line] == [1, *range(3, 31, 3)]  # and after each epoch


def save(path, loaded):
    if path.suffix == ".pt":
        save_state_dict(path, loaded.model, loaded.metadata)
    else:
        write_tensors(path, path, cpu_state(loaded.model), {"format": "pt", RECORD: loaded.metadata.to_text()})


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_a_checkpoint_knows_its_likelihood(tmp_path, ending):
    torch.manual_seed(0)
    points = torch.randn(40, 4)
    data = TensorDataset(points, points[:, :2] * 2)
    text = "mlp?in_features=4&hidden=8&num_classes=2&batch_norm=false"
    start, path = tmp_path / f"a{ending}", tmp_path / f"m{ending}"
    save(start, open_fresh(text, (4,), 2, 0))
    ewc.finetune(start, data, likelihood="gaussian", output=path, epochs=1, eval_on=[])
    assert open_model(path).metadata.likelihood == "gaussian"
    assert ewc.evaluate(path, data)[0].accuracy is None
    anchor = ewc.consolidate(path, data, output=tmp_path / "anchor.safetensors")
    assert anchor.provenance.likelihood == "gaussian"
    assert ewc.evaluate(anchor.path, data)[0].accuracy is None
    again = ewc.finetune(path, data, epochs=1, eval_on={"new": data}, output=tmp_path / f"again{ending}")
    assert again.after[0].accuracy is None
    assert json.loads((again.run / "run.json").read_text())["found"]["likelihood"] == "gaussian"
    # What is said comes first.
    said = ewc.consolidate(path, TensorDataset(points, torch.arange(40) % 2), likelihood="categorical")
    assert said.provenance.likelihood == "categorical"
