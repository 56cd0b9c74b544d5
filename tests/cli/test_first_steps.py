"""What a new user is told on the first day: of results, mistakes and ends."""

import re

import pytest

from ewc_finetune.cli import main
from ewc_finetune.errors import counted
from ewc_finetune.finetuning.observer import RunObserver

OLD, NEW = "digits?limit=200", "digits?limit=200&rotate=90"


@pytest.fixture
def anchored(ewc_ft):
    """A folder with a model and its anchor, which has a probe."""
    ewc_ft("finetune", "--model", "mlp?hidden=8", "--data", OLD, "--epochs", 1, "-o", "m.pt")
    ewc_ft("consolidate", "m.pt", "--data", OLD, "--probe", 64, "-o", "a.safetensors")
    return ewc_ft


def tuned(ewc_ft, *options, expect=0, data=NEW):
    common = ("--anchors", "a.safetensors", "--data", data, "--epochs", 1, "-o", "n.pt", "--overwrite")
    return ewc_ft("finetune", *common, *options, expect=expect).stderr


def test_the_summary_has_what_is_kept_of_the_probes(anchored):
    summary = tuned(anchored).partition("accuracy before")[2]
    assert re.search(r"what is kept of the probes +inputs +unchanged +divergence", summary)
    assert re.search(r"digits\?limit=200 in a.safetensors +64 +[\d.]+% +[\d.e-]+ nats", summary)


def test_without_a_test_split_what_to_do_is_said_at_the_end(anchored, tmp_path):
    rows = ["label," + ",".join(f"p{n}" for n in range(64)), *(f"{n % 10}," + ",".join("0" * 64) for n in range(40))]
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    said = tuned(anchored, data="csv:rows.csv?target=label")
    end = "nothing was scored, for csv:rows.csv?target=label has no test split: ewc-ft evaluate n.pt --data DATA scores"
    assert end in said.splitlines()[-2]
    assert "nothing was scored" not in tuned(anchored)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "mlp?hidden=abc",
            "mlp?hidden=abc: hidden is 'abc'; expected whole numbers, each at least 1, joined by commas",
        ),
        ("mlp?hidden=5,x", "mlp?hidden=5,x: hidden is '5,x'"),
        ("mlp?hidden=-3", "mlp?hidden=-3: hidden is -3"),
        ("mlp?batch_norm=5.5", "mlp?batch_norm=5.5: batch_norm is 5.5; expected True or False"),
        ("mlp?hiden=3", "mlp has no option 'hiden'. Did you mean 'hidden'?"),
        ("cnn?dropout=2", "cnn?dropout=2: dropout is 2; expected a number from 0 to 1"),
        ("cnn?image_size=5", "cnn?image_size=5: image_size is 5; expected a whole number, at least 6"),
    ],
)
def test_options_of_networks(text, message, ewc_ft):
    said = ewc_ft("finetune", "--model", text, "--data", OLD, "-o", "x.pt", expect=2).stderr.splitlines()[-1]
    assert said.startswith(f"Error: {message}")


@pytest.mark.parametrize(
    "text", ["mlp?hidden=8", "mlp?hidden=8,4&batch_norm=False", "cnn?dropout=0.5", "cnn?dropout=0"]
)
def test_options_that_are_right(text, ewc_ft):
    ewc_ft("finetune", "--model", text, "--data", "digits?limit=40", "--epochs", 0, "-o", "x.pt")


def test_a_slip_in_the_name_of_the_probes(anchored):
    for slip in ("probe", "Probes", "prob"):
        said = tuned(anchored, "--rehearse", slip, expect=2)
        assert f"{slip!r} is nothing to rehearse. Did you mean 'probes' (those in the anchors)?" in said


def test_rehearsing_the_new_data_is_remarked_on(anchored):
    remark = "the new data is rehearsed too"
    assert remark in tuned(anchored, "--rehearse", NEW)
    assert remark in tuned(anchored, "--rehearse", f"{NEW}&split=test")
    assert remark not in tuned(anchored, "--rehearse", OLD)
    assert remark not in tuned(anchored, "--rehearse", NEW, "--rehearse-weight", 0)


def test_before_the_first_evaluation_nothing_is_kept_and_that_is_said(anchored, monkeypatch, tmp_path):
    log = RunObserver.log

    def until(step):
        def logging(self, line):
            log(self, line)
            if line["step"] == step and "loss" in line:
                raise KeyboardInterrupt

        monkeypatch.setattr(RunObserver, "log", logging)

    until(1)
    said = tuned(anchored, expect=130)
    assert (
        "nothing of the run is kept, for its first evaluation was not reached; --eval-every N makes it sooner" in said
    )
    assert "--resume" not in said
    assert not (tmp_path / "n.run").exists()
    until(2)
    said = tuned(anchored, "--eval-every", 1, "--log-every", 1, expect=130)
    assert "to go on: ewc-ft finetune --resume n.run" in said
    assert "nothing of the run is kept" not in said
    monkeypatch.setattr(RunObserver, "log", log)
    anchored("finetune", "--resume", "n.run")


def test_commands_are_said_in_a_line_of_80_columns():
    longest = max(map(len, main.commands))
    for name, command in main.commands.items():
        assert command.short_help, name
        assert len(command.short_help) <= 80 - 2 - 4 - 2 - longest + 1, name


def test_one_is_one():
    assert counted(1, "layer") == "1 layer"
    assert counted(2000, "layer") == "2,000 layers"
