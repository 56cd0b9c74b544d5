"""Functions and classes that a file names: a checkpoint the user's own alone, options none unless they are trusted."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import torch
from torch import nn

from ewc_finetune.checkpoint.architecture import as_option, build
from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.state_dict import save_state_dict
from ewc_finetune.errors import ArchitectureError

DATA = "digits?limit=40"
MLP = "mlp?in_features=64&hidden=8&num_classes=10"

# What a stranger may write where a data spec or an architecture is expected.
HOSTILE = {
    "a function of Python": "os:system?command=touch+exploded",
    "a class of Python": "subprocess:Popen?args=touch+exploded",
    "a builtin": "builtins:exec?source=1",
    "a module with side effects": "this:s",
    "an installed function": "torch:load?f=model.pt",
    "an installed class": "torch.nn:Linear?in_features=2&out_features=2",
    "a function of ewc-ft": "ewc_finetune.storage.atomic:sha256?path=model.pt",
    "an imported function": "mine_named:system?command=touch+exploded",
    "an imported class": "mine_named:Linear?in_features=2&out_features=2",
    "a name that is not there": "mine_hostile:nope",
    "a method of an installed class": "mine_named:load_state_dict",
}
# What a file of options may not name either: what is the user's own runs with the file's arguments.
OWN = {
    "a function of the user": "mine_named:wipe?path=exploded",
    "a class of the user": "mine_named:Net?width=3",
    "a module of the user": "mine_hostile:nope",
}
MINE = (
    "from os import system\nfrom torch.nn import Linear\nimport os, torch\n"
    "load_state_dict = torch.nn.Module.load_state_dict\n"
    "class Net(Linear):\n    def __init__(self, width=10):\n        super().__init__(64, width)\n"
    "def wipe(path):\n    open(path, 'w')\n"
    "def data(n=20, split='train'):\n"
    "    g = torch.Generator().manual_seed(0)\n"
    "    return torch.utils.data.TensorDataset(torch.rand(n, 64, generator=g), torch.arange(n) % 10)\n"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with modules of the user's own, in which the user works."""
    (tmp_path / "mine_named.py").write_text(MINE)
    (tmp_path / "mine_hostile.py").write_text("open('exploded', 'w')\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("mine_named", "mine_hostile"):
        sys.modules.pop(name, None)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("key", ["data", "eval", "select-on", "rehearse", "model", "arch", "loss"])
@pytest.mark.parametrize("text", [*HOSTILE.values(), *OWN.values()], ids=[*HOSTILE, *OWN])
def test_a_config_names_no_code(ewc_ft, folder, key, text):
    options = {"data": DATA, "model": MLP, "epochs": 0, "output": "o.pt"} | {key: text}
    if key == "arch":
        torch.save(nn.Linear(2, 2).state_dict(), "weights.pt")
        options["model"] = "weights.pt"
    (folder / "run.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in options.items()))
    said = ewc_ft("finetune", "--config", "run.toml", expect=2).stderr
    assert f"Error: run.toml names code: --{key} " in said
    assert text in said
    assert f"Add --trust-code if you know and trust who wrote the file, or give --{key} yourself" in said
    assert not {"mine_named", "mine_hostile"} & {*sys.modules}
    assert not (folder / "o.pt").exists()


def test_a_sweeps_config_names_no_code(ewc_ft, folder):
    (folder / "s.toml").write_text('data = "os:system?command=touch+exploded"\nanchors = ["a.safetensors"]\n')
    said = ewc_ft("sweep", "--config", "s.toml", expect=2).stderr
    assert "s.toml names code: --data 'os:system?command=touch+exploded'" in said


def test_no_file_can_say_that_it_is_trusted(ewc_ft, folder):
    (folder / "run.toml").write_text('data = "mine_named:wipe?path=exploded"\ntrust-code = true\n')
    assert "trust-code cannot stand in a file" in ewc_ft("finetune", "--config", "run.toml", expect=2).stderr


def test_trusted_code_is_run_and_said(ewc_ft, folder):
    (folder / "run.toml").write_text(
        'data = "mine_named:data?n=30"\nmodel = "mine_named:Net?width=10"\noutput = "o.pt"\nepochs = 1\n'
    )
    said = ewc_ft("finetune", "--config", "run.toml", "--trust-code").stderr
    assert "run.toml names code, which runs: --data 'mine_named:data?n=30'\n" in said
    assert "run.toml names code, which runs: --model 'mine_named:Net?width=10'\n" in said
    again = ewc_ft("evaluate", "o.pt", "--data", "mine_named:data").stderr
    assert f"o.pt: a file names mine_named:Net as the architecture: importing {folder / 'mine_named.py'}\n" in again


def test_what_stands_on_the_command_line_is_free(ewc_ft, folder):
    own = "mine_named:data"
    (folder / "run.toml").write_text(f'data = "torch:load"\neval = ["{own}"]\nmodel = "{MLP}"\nepochs = 0\n')
    assert "--eval mine_named:data" in ewc_ft("finetune", "--config", "run.toml", "--data", DATA, expect=2).stderr
    said = ewc_ft("finetune", "--config", "run.toml", "--data", own, "--eval", own, "-o", "o.pt").stderr
    assert "names code" not in said


def test_ones_own_run_goes_on_where_it_is_trusted(ewc_ft, folder):
    run = ("--model", MLP, "--data", "mine_named:data", "--eval", DATA, "--output", "o.pt", "--epochs", 2)
    fails = "def fails(outputs, targets):\n    calls.append(1)\n    return outputs.sum() / (len(calls) < 2)\n"
    (folder / "mine_named.py").write_text(f"{MINE}calls = []\n{fails}")
    said = ewc_ft("finetune", *run, "--loss", "mine_named:fails", expect=1).stderr
    assert "go on: ewc-ft finetune --resume o.run --trust-code\n" in said
    again = ewc_ft("finetune", "--resume", "o.run", expect=2).stderr
    assert "o.run/run.json names code: --data mine_named:data" in again
    again = ewc_ft("finetune", "--resume", "o.run", "--trust-code", expect=1).stderr
    assert "o.run/run.json names code, which runs: --loss mine_named:fails" in again


def test_a_run_of_somebody_else_runs_nothing(ewc_ft, folder):
    ewc_ft("finetune", "--model", MLP, "--data", DATA, "--output", "o.pt", "--epochs", 1)
    document = json.loads((folder / "o.run" / "run.json").read_text())
    for text in ("os:system?command=touch+exploded", "mine_named:wipe?path=exploded"):
        for key in ("data", "eval", "model", "arch", "loss"):
            options = document["options"] | {key: [text] if key == "eval" else text}
            (folder / "o.run" / "run.json").write_text(json.dumps({**document, "status": "failed", "options": options}))
            for way in ("--resume", "--config"):
                assert f"names code: --{key} '{text}'" in ewc_ft("finetune", way, "o.run", expect=2).stderr


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_checkpoints_record_names_nothing_foreign(ewc_ft, folder, text):
    save_state_dict(folder / "m.pt", nn.Linear(2, 2), ModelMetadata(architecture=text))
    assert "a file names" in ewc_ft("evaluate", "m.pt", "--data", DATA, expect=1).stderr
    with pytest.raises(ArchitectureError, match="a file names"):
        build(text, trusted=False)


def test_a_module_that_hides_an_installed_one_is_not_taken_for_it(folder):
    (folder / "safetensors.py").write_text("from torch import nn\nclass Net(nn.Module):\n    pass\n")
    with pytest.raises(ArchitectureError, match="no such module of your own"):
        build("safetensors:Net", trusted=False)


def test_python_path_counts_and_what_is_linked_into_the_installed_packages_does_not(folder):
    """In a process of its own, whose path begins as that of a user."""
    for place in ("on_path", "linked"):
        (folder / place).mkdir()
        (folder / place / f"{place}_nets.py").write_text("from torch import nn\nclass Net(nn.Module):\n    pass\n")
    packages = folder / "venv" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "editable.pth").write_text(f"import sys\n{folder / 'linked'}\n")
    script = (
        f"import os, sys\nsys.path += [{str(packages)!r}, {str(folder / 'linked')!r}]\n"
        "from ewc_finetune.checkpoint.architecture import build\n"
        "from ewc_finetune.errors import ArchitectureError\n"
        "print(type(build('on_path_nets:Net', trusted=False)).__name__)\n"
        "try:\n    build('linked_nets:Net', trusted=False)\n"
        "except ArchitectureError as error:\n    print('no such module of your own' in str(error))\n"
        "os.chdir('linked')\n"
        "print(type(build('linked_nets:Net', trusted=False)).__name__)\n"
    )
    path = os.pathsep.join([str(folder / "on_path"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], check=False, env=environment, capture_output=True, text=True)
    assert done.stdout == "Net\nTrue\nNet\n", done.stderr


FACTORY = "mine_made:Net.from_name?width=8&name=it's"


@pytest.fixture
def made(ewc_ft, folder):
    """A checkpoint, a model and an anchor whose architecture, a class method, was named on the command line."""
    (folder / "mine_made.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n"
        "    @classmethod\n    def from_name(cls, width, num_classes=10, name=''):\n"
        "        return cls(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, num_classes))\n"
    )
    torch.save(build(FACTORY, trusted=True).state_dict(), "bare.pt")
    said = ewc_ft("consolidate", "bare.pt", "--arch", FACTORY, "--data", DATA, "-o", "a.safetensors").stderr
    assert f"so say it with the anchor too: --arch {shlex.quote(FACTORY)}\n" in said
    ewc_ft("finetune", "--anchors", "a.safetensors", "--arch", FACTORY, "--data", DATA, "--epochs", 0, "-o", "m.pt")
    yield ewc_ft
    sys.modules.pop("mine_made", None)


@pytest.mark.parametrize(
    "command",
    [
        f"finetune --anchors a.safetensors --data {DATA} --epochs 0 -o n.pt",
        f"finetune --model m.pt --data {DATA} --epochs 0 -o n.pt",
        f"evaluate m.pt --data {DATA}",
        f"evaluate a.safetensors --data {DATA}",
        f"consolidate m.pt --data {DATA} -o b.safetensors",
        f"mend m.pt --anchors a.safetensors --data {DATA} --ratio 0.5 -o n.pt",
        "merge a.safetensors a.safetensors -o b.safetensors --checkpoint n.pt",
    ],
)
def test_where_a_file_names_a_factory_the_option_to_copy_is_offered_and_works(command, made):
    said = made(*command.split(), expect=1).stderr
    option = f"name it yourself with --arch {shlex.quote(FACTORY)}"
    assert "a file may name nothing else. If you trust it" in said
    assert option in said
    made(*command.split(), *shlex.split(option.partition("with ")[2]))


def test_inspect_shows_the_option_to_copy(made):
    assert f"--arch {shlex.quote(FACTORY)}" in made("inspect", "m.pt").output


def test_no_part_of_python_is_offered_to_be_copied(folder):
    assert as_option("os:system?command=touch+exploded") == as_option("importlib.util:find_spec") == "--arch"
    for text in HOSTILE.values():
        with pytest.raises(ArchitectureError) as error:
            build(text, trusted=False)
        top = text.partition(":")[0].partition(".")[0]
        assert (f"--arch {shlex.quote(text)}" in str(error.value)) == (top not in sys.stdlib_module_names)
