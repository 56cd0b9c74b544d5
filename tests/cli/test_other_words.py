"""What people from elsewhere type leads to the option or command that they mean."""

import click
import pytest

from ewc_finetune.cli import main
from ewc_finetune.cli.other_words import COMMANDS, OPTIONS, meant, names


@pytest.mark.parametrize(
    ("command", "typed", "expected"),
    [
        ("finetune", "--criterion", "--loss"),
        ("finetune", "--learning-rate", "--lr"),
        ("finetune", "--learning_rate", "--lr"),
        ("finetune", "--ewc-lambda", "--lambda"),
        ("sweep", "--strength", "--lambda"),
        ("finetune", "--old-data", "--anchors or --eval or ewc-ft consolidate --data or --rehearse"),
        ("finetune", "--max_steps", "--epochs"),
        ("finetune", "--output_dir", "--output"),
        ("merge", "--out", "--output"),
        ("evaluate", "--gpu", "--device cuda"),
        ("finetune", "--fp16", "--amp fp16"),
        ("finetune", "--checkpoint", "--model"),
        ("evaluate", "--checkpoint", "MODEL, without an option"),
        ("merge", "--anchors", "ANCHOR, without an option"),
        ("finetune", "--dataset", "--data"),
        ("finetune", "--per_device_train_batch_size", "--batch-size"),
        ("finetune", "--batch_size", "--batch-size"),
        ("finetune", "--gradient-accumulation-steps", "--accumulate"),
        ("finetune", "--load_best_model_at_end", "--keep best"),
        ("mend", "--lambda", "--ratio"),
        ("consolidate", "--mc-samples", "--draws"),
        ("finetune", "--rtol", "ewc-ft consolidate --rtol"),
        ("finetune", "--push_to_hub", "ewc-ft push"),
    ],
)
def test_options(ewc_ft, command, typed, expected):
    said = ewc_ft(command, typed, "1", expect=2).stderr
    assert f"Error: No such option '{typed}'. Did you mean {expected}?" in said


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("train", "finetune"),
        ("fisher", "consolidate"),
        ("anchor", "consolidate"),
        ("eval", "evaluate"),
        ("test", "evaluate"),
        ("upload", "push"),
        ("download", "pull"),
    ],
)
def test_commands(ewc_ft, typed, expected):
    assert f"No such command '{typed}'. Did you mean {expected}?" in ewc_ft(typed, "--x", expect=2).stderr


def test_what_is_like_no_word_is_refused_as_ever(ewc_ft):
    assert "No such option '--zzzzz'." in ewc_ft("finetune", "--zzzzz", expect=2).stderr
    assert "No such command 'zzzzz'." in ewc_ft("zzzzz", expect=2).stderr
    assert "--data" in ewc_ft("finetune", "--dta", "x", expect=2).stderr
    assert "ewc-ft" not in ewc_ft("evaluate", "m.pt", "--output", "x", expect=2).stderr.partition("Error: ")[2]


def takes(command, name, value):
    types = [one.type for one in command.params if name in one.opts]
    return not value or any(isinstance(kind, click.Choice) and value in kind.choices for kind in types)


@pytest.mark.parametrize("it", OPTIONS)
def test_no_word_is_stale(it):
    name, _, value = it.partition(" ")
    if name == "ewc-ft":
        command, *options = value.split()
        assert set(options) <= names(main.commands[command])
        having = main.commands.values()
    else:
        having = [one for one in main.commands.values() if name in names(one) and takes(one, name, value)]
    assert having
    words = OPTIONS[it].split()
    assert len(set(words)) == len(words)
    for word in words:
        missing = [command for command in having if f"--{word}" not in names(command)]
        assert missing, f"--{word} is an option itself"
        for command in missing:
            assert it in meant(command, main.commands, f"--{word}")


def test_no_command_is_stale():
    assert COMMANDS.keys() <= main.commands.keys()
    words = [word for text in COMMANDS.values() for word in text.split()]
    assert len(set(words)) == len(words)
    assert not set(words) & main.commands.keys()
