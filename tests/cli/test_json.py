"""What --json prints is what its schema says: the result of every command, and everything that goes wrong."""

import json
import math
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support import ROOT

from ewc_finetune.cli import main
from ewc_finetune.cli.completion import completion
from ewc_finetune.cli.result import VERSIONS, as_text

SCHEMA = json.loads((ROOT / "ewc_finetune" / "cli" / "documents.schema.json").read_text())
KINDS = [one["$ref"].rpartition("/")[2] for one in SCHEMA["oneOf"]]
OLD, NEW = "digits?limit=60", "digits?limit=60&rotate=90"


def strict(schema):
    """Return a schema that takes no keys but those that it names."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(part) for name, part in schema.items()}
    return closed | {"additionalProperties": False} if "properties" in closed else closed


def no_json(token):
    raise AssertionError(f"{token} is nothing that JSON has")


def read(text, kind):
    """Read the one document in a text, which must be of this kind."""
    document = json.loads(text, parse_constant=no_json)
    schema = strict({name: part for name, part in SCHEMA.items() if name != "oneOf"})
    Draft202012Validator({**schema, "$ref": f"#/$defs/{kind}"}).validate(document)
    Draft202012Validator(SCHEMA).validate(document)
    return document


# In their order, for what one writes the next reads.
RUNS = [
    ("finetune", f"finetune --model mlp?hidden=4 --data {OLD} --epochs 1 -o m.pt"),
    ("dry-run", f"consolidate m.pt --data {OLD} -o a.safetensors --dry-run"),
    ("consolidate", f"consolidate m.pt --data {OLD} --probe 40 -o a.safetensors"),
    ("dry-run", f"finetune --anchors a.safetensors --data {NEW} --epochs 1 -o n.pt --dry-run"),
    ("finetune", f"finetune --anchors a.safetensors --data {NEW} --epochs 1 --lambda auto --rehearse probes -o n.pt"),
    ("consolidate", f"consolidate n.pt --data {NEW} --curvature kfac -o k.safetensors"),
    ("consolidate", f"consolidate n.pt --data {NEW} --curvature-dtype bfloat16 -o b.safetensors"),
    ("evaluate", f"evaluate n.pt --data {OLD} --data {NEW}"),
    ("merge", "merge a.safetensors b.safetensors -o ab.safetensors --checkpoint ab.pt"),
    ("merge", "merge k.safetensors -o kk.safetensors"),
    ("mend", f"mend n.pt --data {NEW} --anchors a.safetensors --eval {OLD} --polish 1"),
    ("inspect-anchor", "inspect ab.safetensors --verify"),
    ("inspect-anchor", "inspect kk.safetensors"),
    ("inspect-checkpoint", "inspect n.pt"),
    ("report", "report n.run"),
    ("dry-run", f"sweep --anchors a.safetensors --data {NEW} --eval {OLD} --eval {NEW} --epochs 1 --dry-run"),
    (
        "sweep",
        f"sweep --anchors a.safetensors --data {NEW} --eval {OLD} --eval {NEW} --epochs 1 --lambda 1,100 --seed 0,1",
    ),
]


def test_every_result_is_as_its_schema_says(ewc_ft):
    for kind, line in RUNS:
        document = read(ewc_ft(*line.split(), "--json").stdout, kind)
        assert document["command"] == line.split()[0]
        assert document["schema"] == f"ewc-ft/{kind}/{VERSIONS[kind]}"


def test_the_hub(ewc_ft, hub):
    ewc_ft("finetune", "--model", "mlp?hidden=4", "--data", OLD, "--epochs", 0, "-o", "m.pt")
    ewc_ft("consolidate", "m.pt", "--data", OLD, "-o", "a.safetensors")
    pushed = read(ewc_ft("push", "a.safetensors", "someone/old", "--json").stdout, "push")
    pulled = read(ewc_ft("pull", "hf://someone/old", "-o", "b.safetensors", "--json").stdout, "pull")
    assert pushed["sha256"] == pulled["sha256"]


def test_every_kind_has_a_schema_and_is_tried():
    Draft202012Validator.check_schema(SCHEMA)
    assert sorted(KINDS) == sorted(VERSIONS)
    assert {kind for kind, _ in RUNS} | {"push", "pull", "error"} == set(KINDS)
    commands = {one for kind in KINDS for one in spoken(SCHEMA["$defs"][kind]["properties"]["command"])}
    assert commands == main.commands.keys() - {completion.name}


def spoken(command):
    return [command["const"]] if "const" in command else command.get("enum", [])


@pytest.mark.parametrize(
    ("line", "error", "code", "command"),
    [
        ("finetune", "MissingParameter", 2, "finetune"),
        ("finetune --criterion x", "NoSuchOption", 2, "finetune"),
        ("finetune --lr fast --data digits", "BadParameter", 2, "finetune"),
        ("finetune --lr -1 --model mlp --data digits", "UsageError", 2, "finetune"),
        ("finetune --config gone.toml", "StorageError", 1, "finetune"),
        ("finetune --resume gone.run", "StorageError", 1, "finetune"),
        ("evaluate gone.pt --data digits", "CheckpointError", 1, "evaluate"),
        ("train --data digits", "UsageError", 2, None),
        ("nothing --data digits", "NoSuchCommand", 2, None),
        ("--nothing", "NoSuchOption", 2, None),
        ("merge one two --lambda 0 --gamma 0.5 -o x", "SeveralError", 2, "merge"),
    ],
)
def test_errors(ewc_ft, line, error, code, command):
    result = ewc_ft(*line.split(), "--json", expect=code)
    document = read(result.stdout, "error")
    assert document["command"] == command
    assert (document["error"]["type"], document["error"]["exit_code"]) == (error, code)
    assert f"Error: {document['error']['message']}\n" in result.stderr
    assert ewc_ft(*line.split(), expect=code).stdout == ""


def test_of_several_errors_each_is_there(ewc_ft):
    line = "merge one two --lambda 0 --gamma 0.5 -o x --json"
    errors = read(ewc_ft(*line.split(), expect=2).stdout, "error")["error"]["errors"]
    assert {(error["type"], error["exit_code"]) for error in errors} == {("UsageError", 2), ("AnchorError", 1)}
    assert any("gamma belongs" in error["message"] for error in errors)


@pytest.mark.parametrize(("raised", "error", "code"), [(ZeroDivisionError("oh"), "ZeroDivisionError", 1),
                                                       (KeyboardInterrupt(), "Interrupted", 130)])  # fmt: skip
def test_what_nobody_foresaw(ewc_ft, monkeypatch, raised, error, code):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr("ewc_finetune.commands.evaluate.evaluate", fail)
    said = read(ewc_ft("evaluate", "m.pt", "--data", "digits", "--json", expect=code).stdout, "error")["error"]
    assert (said["type"], said["exit_code"]) == (error, code)
    if code == 1:
        assert said["message"] == "ZeroDivisionError: oh"
        with_traceback = ewc_ft("evaluate", "m.pt", "--data", "digits", "--json", "--debug", expect=1)
        assert read(with_traceback.stdout, "error")["error"] == said
        assert "Traceback" in with_traceback.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(tmp_path, number, code):
    line = "finetune --model mlp?hidden=4 --data digits --epochs 100000 --eval-every 1 -o m.pt --json"
    process = subprocess.Popen(
        [sys.executable, "-m", "ewc_finetune", *line.split()],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while "step" not in process.stderr.readline():  # the training goes on
        assert process.poll() is None
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == code
    document = read(printed, "error")
    assert document["command"] == "finetune"
    assert document["error"] == {
        "type": "Interrupted",
        "message": "Interrupted." if number == signal.SIGINT else "Terminated.",
        "exit_code": code,
    }


# Documents of any depth, with numbers that JSON does not have.
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=10,
)


def finite(value):
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(documents)
def test_numbers_that_json_does_not_have_are_null(content):
    document = json.loads(as_text("evaluate", "evaluate", {"x": content}), parse_constant=no_json)
    assert document == {"schema": "ewc-ft/evaluate/1", "command": "evaluate", "x": finite(content)}


def test_a_score_that_is_infinite(ewc_ft, monkeypatch):
    from ewc_finetune.evaluation.evaluation import Evaluation
    from ewc_finetune.evaluation.score import Score

    scores = Evaluation([Score("old", 1, 1e4, 0.5, math.inf)])
    monkeypatch.setattr("ewc_finetune.commands.evaluate.evaluate", lambda *_, **__: scores)
    found = read(ewc_ft("evaluate", "m.pt", "--data", "digits", "--json").stdout, "evaluate")
    assert found["scores"][0]["perplexity"] is None


def test_the_readme_names_every_key():
    table = (ROOT / "README.md").read_text().partition("| `schema` | keys |")[2].partition("\n\n")[0]
    told = {
        kind: set(re.findall(r"`(\w+)`", keys))
        for kind, keys in re.findall(r"^\| `ewc-ft/(\S+)/\d+` \| (.*) \|$", table, re.M)
    }
    assert told == {kind: SCHEMA["$defs"][kind]["properties"].keys() - {"schema", "command"} for kind in KINDS}


def test_an_option_called_json_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["consolidate", "gone.pt", "--data", "digits", "--name", "--json"])
    assert (result.exit_code, result.stdout) == (1, "")
