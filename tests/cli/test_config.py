"""Where the options of a run come from, and where they go to."""

import pytest

import ewc_finetune as ewc
from ewc_finetune.cli import main
from ewc_finetune.errors import StorageError, UsageError
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.finetuning.request import asked
from ewc_finetune.runs.options_file import differences, read_config, to_command, to_toml
from ewc_finetune.runs.record import read_run

BASE = ("finetune", "--model", "mlp?hidden=16", "--data", "digits", "--output", "m.pt")


def option_names():
    """The options of `finetune`, by their long names."""
    return {max(option.opts, key=len).lstrip("-") for option in main.commands["finetune"].params}


def test_a_run_says_how_it_can_be_done_again(ewc_ft, tmp_path):
    ewc_ft(*BASE, "--epochs", 1, "--lr", "1e-3", "--freeze", "body.norm1.*", "--clip", 0.5)
    run = read_run(tmp_path / "m.run").document
    assert run["command"] == (
        "ewc-ft finetune --data digits --model 'mlp?hidden=16' --epochs 1 --lr 0.001 --clip 0.5 "
        "--freeze 'body.norm1.*' --output m.pt"
    )
    assert run["folder"] == str(tmp_path)
    first = (tmp_path / "m.pt").read_bytes()
    toml = (tmp_path / "m.run" / "run.toml").read_text()
    assert toml == to_toml(run["options"], {"overwrite", "trust-code"})
    for config in ("m.run/run.toml", "m.run", "m.run/run.json"):
        ewc_ft("finetune", "--config", config, "--output", "again.pt", "--overwrite")
        assert (tmp_path / "again.pt").read_bytes() == first
        again = read_run(tmp_path / "again.run").document["options"]
        assert {name for name in again if again[name] != run["options"][name]} == {"output", "overwrite"}


def test_what_the_command_line_says_comes_before_the_config(ewc_ft, tmp_path):
    (tmp_path / "run.toml").write_text(
        'model = "mlp?hidden=16"\ndata = "digits"\neval = "digits"\nepochs = 3\nbatch_size = 50\nfreeze = ["head.*"]\n'
    )
    ewc_ft("finetune", "--config", "run.toml", "--epochs", 1, "-o", "m.pt")
    options = read_run(tmp_path / "m.run").document["options"]
    assert (options["epochs"], options["batch-size"], options["eval"]) == (1, 50, ["digits"])
    assert options["freeze"] == ["head.*"]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("lamda = 3", 2, "there is no option 'lamda'. Did you mean 'lambda'?"),
        ("batchsize = 3", 2, "there is no option 'batchsize'. Did you mean 'batch-size'?"),
        ("[training]\nlr = 3", 2, "there is no option 'training'"),
        ("[data]\nname = 3", 2, "data is a table; options stand at the top, one to a line: data = ..."),
        ("epochs = 'many'", 2, "'many' is not a valid integer"),
        ("lr = [1, 2]", 2, "run.toml: lr is a list; it takes one value"),
        ("optimizer = 'adm'", 2, "Invalid value for '--optimizer'"),
        ("quiet = true", 2, "quiet cannot stand in a file; give it on the command line"),
        ("trust_code = true", 2, "trust_code cannot stand in a file"),
        ("trust_pickle = true", 2, "trust_pickle cannot stand in a file"),
        ("seed = true", 2, "seed is true or false; it takes a value"),
        ("eval = [[1]]", 2, "no data is called"),
        ("lr = ", 1, "run.toml is no TOML file"),
        ("\x00", 1, "run.toml is no TOML file"),
        (None, 1, "there is no config at run.toml"),
    ],
)
def test_wrong_configs(ewc_ft, tmp_path, text, code, message):
    if text is not None:
        (tmp_path / "run.toml").write_text(text)
    result = ewc_ft(*BASE, "--config", "run.toml", expect=code)
    assert message in result.output
    assert not (tmp_path / "m.run").exists()


def test_a_config_that_is_no_run(ewc_ft, tmp_path):
    (tmp_path / "a.run").mkdir()
    assert "a.run is no run folder" in ewc_ft(*BASE, "--config", "a.run", expect=1).output
    (tmp_path / "c.toml").write_text("b = 1")
    with pytest.raises(UsageError, match="no option 'b'"):
        read_config(tmp_path / "c.toml", ["a"])
    with pytest.raises(StorageError, match="no config at"):
        read_config(tmp_path / "d.toml", ["a"])


def test_every_option_of_the_command_line_is_one_of_the_function():
    assert (
        option_names() - {"config", "resume", "dry-run", "quiet", "verbose", "json", "debug", "help-all"}
        == asked(FinetuneOptions(None, None)).keys()
    )


def test_commands_quote_what_they_must():
    known = {"lambda": None, "overwrite": False, "eval": None, "lr": 0.1}
    options = {"data": "a b?x=1&y=2", "lambda": [1e-5, 30.0], "overwrite": True, "eval": ["c", "d"], "lr": 0.1}
    assert to_command(options, known) == (
        "ewc-ft finetune --data 'a b?x=1&y=2' --lambda 1e-05 --lambda 30 --overwrite --eval c --eval d"
    )
    assert to_command({"lr": 0.30000000000000004}, known).endswith("0.30000000000000004")
    assert differences({"a": 1, "b": [2]}, {"a": 1, "b": []}) == {"b": "b was not given, is [2]"}


def test_a_run_of_a_module_has_no_command(tmp_path):
    model = ewc.finetune("mlp?hidden=16", "digits?limit=20", epochs=0, eval_on=[]).model
    done = ewc.finetune(model, "digits?limit=20", epochs=0, eval_on=[], output=tmp_path / "m.pt", architecture="x:Y")
    run = read_run(done.run).document
    assert run["command"] is None
    assert run["options"]["model"] == "a MLP"
