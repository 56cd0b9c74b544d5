"""2 for words of a command that are wrong, 1 for files, devices and work that are not as they should be."""

import pytest
import torch
from torch import nn

from ewc_finetune import errors
from ewc_finetune.checkpoint.architecture import build
from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.state_dict import save_state_dict
from ewc_finetune.errors import ArchitectureError, EwcError, StorageError, UsageError, suggest

DATA = "digits?limit=40"
FRESH = f"finetune --model mlp?hidden=4 --epochs 0 --data {DATA}"
TUNE = f"finetune --anchors a.safetensors --epochs 0 --data {DATA}"
CODES = {
    # Data.
    "evaluate m.pt --data digit": 2,
    "evaluate m.pt --data ?limit=3": 2,
    "evaluate m.pt --data m.pt": 2,
    "evaluate m.pt --data digits?limt=3": 2,
    "evaluate m.pt --data digits?limit=none": 2,
    "evaluate m.pt --data digits?limit=3&limit=4": 2,
    "evaluate m.pt --data digits?split=dev": 2,
    "evaluate m.pt --data csv:t.csv?target=nothing": 2,
    "evaluate m.pt --data csv:gone.csv": 1,
    "evaluate m.pt --data npz:t.csv": 1,
    "evaluate m.pt --data imagefolder:gone": 1,
    "evaluate m.pt --data no_such_module:data": 1,
    "evaluate m.pt --data digits?size=9": 1,
    # Models and architectures.
    f"evaluate gone.pt --data {DATA}": 1,
    f"evaluate t.csv --data {DATA}": 1,
    f"evaluate hf:// --data {DATA}": 2,
    f"evaluate m.pt --data {DATA} --arch mpl": 2,
    f"evaluate m.pt --data {DATA} --arch mlp?hiden=3": 2,
    f"evaluate m.pt --data {DATA} --arch mlp?hidden=none": 2,
    f"evaluate m.pt --data {DATA} --arch torchvision:resnt18": 2,
    f"evaluate m.pt --data {DATA} --arch torchvision:resnet18?num_clases=3": 2,
    f"evaluate m.pt --data {DATA} --arch torchvision:resnet18?weights=DEFAULT": 2,
    f"evaluate m.pt --data {DATA} --arch no_such_module:Net": 1,
    f"evaluate m.pt --data {DATA} --arch mlp?hidden=5": 1,
    f"evaluate written.pt --data {DATA}": 1,
    # Anchors and their strengths.
    f"finetune --anchors gone.safetensors --data {DATA}": 1,
    f"finetune --anchors m.pt --data {DATA}": 1,
    f"{TUNE} --lambda much": 2,
    f"{TUNE} --lambda -1": 2,
    f"{TUNE} --lambda nan": 2,
    f"{TUNE} --lambda 1 --lambda 2": 2,
    f"{TUNE} --lambda auto --lambda 2": 2,
    f"{TUNE} --retain 2": 2,
    f"{TUNE} --rehearse probe": 2,
    f"{TUNE} --freeze nothing.*": 2,
    f"{TUNE} --likelihood bernoulli": 2,
    "merge a.safetensors -o x.safetensors --gamma 0.5": 2,
    "merge a.safetensors gone.safetensors -o x.safetensors": 1,
    # Options that there are not, are missing, cannot be, or contradict each other.
    "finetune": 2,
    f"finetune --data {DATA}": 2,
    f"{FRESH} --loss mse": 2,
    f"{FRESH} --lr fast": 2,
    f"{FRESH} --lr 0": 2,
    f"{FRESH} --optimizer lion": 2,
    f"{FRESH} --batch-size 0": 2,
    f"{FRESH} --warmup 1.5": 2,
    f"consolidate m.pt --data {DATA} --kfac-form reduce": 2,
    f"consolidate m.pt --data {DATA} --draws 3 --estimator exact": 2,
    f"consolidate m.pt --data {DATA} --samples none": 2,
    f"consolidate m.pt --data {DATA} --data {DATA}": 2,
    "inspect m.pt --plot p.png": 2,
    "inspect a.safetensors --plot p": 2,
    "train": 2,
    # Outputs.
    f"{FRESH} -o m.pt": 1,
    f"{FRESH} -o gone/m.pt": 1,
    f"consolidate m.pt --data {DATA} -o m.pt --overwrite": 2,
    "merge a.safetensors -o a.safetensors --overwrite": 2,
    "merge a.safetensors -o x.safetensors --checkpoint x.safetensors": 2,
    # Files of options, runs and reports.
    "finetune --config gone.toml": 1,
    "finetune --config t.csv": 1,
    "finetune --config wrong.toml": 2,
    "finetune --resume gone.run": 1,
    "report gone.run": 1,
    # The work itself, and devices.
    f"{FRESH} --optimizer sgd --lr 1e30 --epochs 3 -o wild.pt": 1,
    # Addresses on the Hub.
    "pull hf://no": 2,
    "push a.safetensors somebody": 2,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, its anchor, a table, options that there are not, and a model whose record names a wrong architecture."""
    from click.testing import CliRunner

    from ewc_finetune.cli import main

    folder = tmp_path_factory.mktemp("files")
    for line in (f"{FRESH} -o {folder}/m.pt", f"consolidate {folder}/m.pt --data {DATA} -o {folder}/a.safetensors"):
        assert CliRunner().invoke(main, line.split()).exit_code == 0
    (folder / "t.csv").write_text("a,b\n1,2\n3,4\n")
    (folder / "wrong.toml").write_text("loss = 'mse'\n")
    save_state_dict(folder / "written.pt", nn.Linear(64, 10), ModelMetadata(architecture="mlp?hiden=4"))
    return folder


@pytest.mark.parametrize("line", CODES)
def test_codes(ewc_ft, files, monkeypatch, line):
    monkeypatch.chdir(files)
    before = sorted(path.name for path in files.iterdir())
    result = ewc_ft(*line.split(), expect=CODES[line])
    assert "Error: " in result.stderr
    assert "not an error that ewc-ft foresaw" not in result.stderr
    assert sorted(path.name for path in files.iterdir()) == before


def test_a_run_that_is_not_there_is_told_from_a_folder_that_is_none(ewc_ft, tmp_path):
    (tmp_path / "other").mkdir()
    assert "gone.run is not there. Name the folder" in ewc_ft("finetune", "--resume", "gone.run", expect=1).stderr
    assert "other is no run folder: there is no run.json" in ewc_ft("finetune", "--resume", "other", expect=1).stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(ewc_ft, files, monkeypatch):
    monkeypatch.chdir(files)
    ewc_ft("evaluate", "m.pt", "--data", DATA, "--device", "cuda", expect=1)
    ewc_ft("evaluate", "m.pt", "--data", DATA, "--device", "gpu", expect=2)


def test_it_is_said_by_the_class():
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, EwcError) and kind is not errors.SeveralError:
            assert kind.exit_code == (2 if issubclass(kind, UsageError) else 1)
    assert issubclass(errors.WrongArchitectureError, ArchitectureError)
    assert issubclass(errors.PathClashError, StorageError)


def test_what_a_file_names_nobody_typed():
    for text in ("mlp?hiden=3", "mpl", "torchvision:resnt18", "mlp?hidden"):
        with pytest.raises(UsageError):
            build(text, trusted=True)
        with pytest.raises(ArchitectureError) as error:
            build(text, trusted=False)
        assert error.value.exit_code == 1


def test_of_many_known_words_the_nearest_are_named():
    with pytest.raises(ArchitectureError) as error:
        build("torchvision:resnt18", trusted=True)
    said = str(error.value)
    assert "Did you mean 'resnet18'? The nearest of " in said
    assert len(said.rpartition(": ")[2].split(", ")) == 5
    assert suggest("lat", ["last", "first"]) == "Did you mean 'last'? Known: first, last"
    assert suggest("nothing", [f"layer{n}" for n in range(31)]).startswith("The nearest of 31: layer")
