import io
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict

import pytest
import torch
from support.files import Bomb
from torch import nn

from ewc_finetune.checkpoint.architecture import (
    build,
    builds_by_itself,
    complete,
    looks_like_architecture,
    with_outputs,
)
from ewc_finetune.checkpoint.builtin_models import CNN, MLP
from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.state_dict import save_state_dict
from ewc_finetune.checkpoint.open import load_checkpoint, open_checkpoint, open_model
from ewc_finetune.errors import ArchitectureError, CheckpointError, NonFiniteError, UsageError

TINY = "mlp?in_features=3&hidden=4&num_classes=2"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_tiny(path, metadata=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = MLP(3, 4, 2).to(dtype)
    save_state_dict(
        path, model, metadata or ModelMetadata(architecture=TINY, input={"shape": [3]}, lineage=[{"name": "a"}])
    )
    return model


def test_round_trip(folder):
    model = save_tiny(folder / "m.pt")
    loaded = open_model(folder / "m.pt")
    assert loaded.metadata == ModelMetadata(architecture=TINY, input={"shape": [3]}, lineage=[{"name": "a"}])
    assert loaded.file == "m.pt"
    assert len(loaded.sha256) == 64
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    assert not loaded.model.training


def test_the_file_is_a_plain_state_dict_for_everybody_else(folder):
    model = save_tiny(folder / "m.pt")
    other = MLP(3, 4, 2)
    other.load_state_dict(torch.load("m.pt", weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert set(torch.load("m.pt", weights_only=True)) == set(model.state_dict())


def test_the_same_model_gives_the_same_bytes_whatever_the_file_is_called(folder):
    save_tiny(folder / "one.pt")
    save_tiny(folder / "other_name.pt")
    assert (folder / "one.pt").read_bytes() == (folder / "other_name.pt").read_bytes()


def test_somebody_elses_state_dict_takes_an_architecture(folder):
    torch.save(MLP(3, 4, 2).state_dict(), "m.pt")
    with pytest.raises(ArchitectureError, match=r"does not say what architecture .* --arch"):
        open_model("m.pt")
    assert open_model("m.pt", TINY).metadata.architecture == TINY


def test_half_precision_keeps_its_dtype(folder):
    save_tiny(folder / "m.pt", dtype=torch.bfloat16)
    model = open_model("m.pt").model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    save_state_dict(folder / "again.pt", model, open_model("m.pt").metadata)
    assert (folder / "again.pt").read_bytes() == (folder / "m.pt").read_bytes()


class TiedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x))


def test_tied_weights_stay_tied(folder):
    model = TiedNet()
    (folder / "nets.py").write_text(
        "from torch import nn\n" + __import__("inspect").getsource(TiedNet).replace("TiedNet", "Net")
    )
    metadata = ModelMetadata(architecture="nets:Net")
    save_state_dict(folder / "m.pt", model, metadata)
    found = open_model("m.pt").model
    assert found.out.weight is found.embed.weight
    assert torch.equal(found.out.weight, model.out.weight)
    # One of the two names is enough.
    torch.save({"embed.weight": model.embed.weight.detach()}, "one.pt")
    assert torch.equal(open_model("one.pt", "nets:Net").model.out.weight, model.out.weight)


def bombs():
    yield "plain pickle", pickle.dumps(Bomb())
    yield "in a state dict", pickle.dumps({"weight": Bomb()})
    buffer = io.BytesIO()
    torch.save({"weight": Bomb()}, buffer)
    yield "in torch's archive", buffer.getvalue()
    buffer = io.BytesIO()
    torch.save({"weight": Bomb()}, buffer, _use_new_zipfile_serialization=False)
    yield "in torch's legacy format", buffer.getvalue()


@pytest.mark.parametrize(("kind", "content"), list(bombs()), ids=lambda v: v if isinstance(v, str) else "")
def test_no_code_in_a_checkpoint_is_ever_run(folder, kind, content):
    (folder / "m.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="m.pt"):
        load_checkpoint("m.pt")
    assert not (folder / "exploded").exists()


def test_a_pickled_module_is_refused_with_what_it_asks_for(folder):
    torch.save(nn.Linear(2, 2), "m.pt")
    with pytest.raises(CheckpointError, match=r"asks for more than tensors .*Linear.*save its weights alone"):
        load_checkpoint("m.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello, this is text and no checkpoint at all", "is not a checkpoint: it is a text"),
        (b"a", "is not a checkpoint: it is a text"),
        ("# Ein Text über etwas\n".encode(), "is not a checkpoint: it is a text"),
        (b"PK\x03\x04 not really", "is a damaged archive"),
        (b"\x80\x02}q\x00.", "is not a checkpoint"),
    ],
)
def test_files_that_are_no_checkpoint(folder, content, message):
    (folder / "m.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint("m.pt")


def test_cut_archives_and_foreign_zips(folder):
    save_tiny(folder / "whole.pt")
    whole = (folder / "whole.pt").read_bytes()
    for length in (10, 100, len(whole) // 2, len(whole) - 1):
        (folder / "m.pt").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="m.pt"):
            load_checkpoint("m.pt")
    with zipfile.ZipFile("m.pt", "w") as archive:
        archive.writestr("../evil", "x")
    with pytest.raises(CheckpointError):
        load_checkpoint("m.pt")
    with pytest.raises(CheckpointError, match="there is no checkpoint at none.pt"):
        load_checkpoint("none.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list"),
        ({}, "holds an empty dict"),
        ({"epoch": 3, "state_dict": {}}, "the entry 'epoch' is a int, not a tensor"),
        (OrderedDict(weights={"w": torch.ones(1)}), "'weights' is a dict"),
    ],
)
def test_what_is_no_state_dict(folder, content, message):
    torch.save(content, "m.pt")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint("m.pt")


def test_nan_in_the_weights(folder):
    model = MLP(3, 4, 2)
    with torch.no_grad():
        model.head.weight[1, 2] = float("nan")
    torch.save(model.state_dict(), "m.pt")
    with pytest.raises(NonFiniteError, match=r"m\.pt: head\.weight holds NaN or infinity \(1 of 8 values\)"):
        open_model("m.pt", TINY)


def test_tied_weights_that_contradict_each_other(folder):
    (folder / "tied_nets.py").write_text(
        "from torch import nn\n" + __import__("inspect").getsource(TiedNet).replace("TiedNet", "Net")
    )
    torch.save({"embed.weight": torch.ones(5, 4), "out.weight": torch.zeros(5, 4)}, "m.pt")
    with pytest.raises(CheckpointError, match=r"embed\.weight and out\.weight differ, but are one tied parameter"):
        open_model("m.pt", "tied_nets:Net")


def test_what_is_frozen_stays_frozen(folder):
    save_tiny(folder / "m.pt", ModelMetadata(architecture=TINY, frozen=["body.linear1.weight"]))
    frozen = [name for name, p in open_model("m.pt").model.named_parameters() if not p.requires_grad]
    assert frozen == ["body.linear1.weight"]


def test_integer_weights_are_refused(folder):
    state = MLP(3, 4, 2).state_dict()
    state["head.weight"] = state["head.weight"].to(torch.int8)
    torch.save(state, "m.pt")
    with pytest.raises(CheckpointError, match=r"head\.weight is torch\.int8; quantized"):
        open_model("m.pt", TINY)


def test_an_architecture_that_does_not_fit_is_named_with_both_shapes(folder):
    torch.save(MLP(3, 4, 2).state_dict(), "m.pt")
    checkpoint = load_checkpoint("m.pt")
    with pytest.raises(
        ArchitectureError, match=r"body\.linear1\.weight has shape \(4, 3\) in the checkpoint and \(5, 3\)"
    ):
        open_checkpoint(checkpoint, "mlp?in_features=3&hidden=5&num_classes=2")
    with pytest.raises(
        ArchitectureError, match=r"body\.linear2\.weight .* is in the architecture but not in the checkpoint"
    ):
        open_checkpoint(checkpoint, "mlp?in_features=3&hidden=4,4&num_classes=2")
    with pytest.raises(ArchitectureError, match=r"and \d+ more"):
        open_checkpoint(checkpoint, "cnn")


def test_architectures_by_name(folder):
    assert isinstance(build("mlp", trusted=False), MLP)
    assert isinstance(build("cnn?image_size=8&dropout=0.5", trusted=False), CNN)
    assert build("torchvision:resnet18?num_classes=7", trusted=False).fc.out_features == 7
    (folder / "mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, width=2, bias=True, name=None):\n"
        "        super().__init__(nn.Linear(2, width, bias))\n"
        "def make(width):\n    return Net(width)\n"
        "def wrong():\n    return 3\n"
    )
    net = build("mine:Net?width=5&bias=false&name=x", trusted=False)
    assert net[0].weight.shape == (5, 2)
    assert net[0].bias is None
    assert build("mine:make?width=3", trusted=True)[0].weight.shape == (3, 2)
    with pytest.raises(ArchitectureError, match="gives a int"):
        build("mine:wrong", trusted=True)
    assert str(folder) not in sys.path


UNTRUSTED = {
    "a function": "os:system?command=touch+exploded",
    "a builtin": "builtins:exec",
    "a function of ours": "mine_untrusted:make",
    "a class that is not there": "mine_untrusted:Nope",
    "a module with side effects": "this:Zen",
    "a class that is no module": "pathlib:Path",
    "weights by download": "torchvision:resnet18?weights=DEFAULT",
    "timm's weights by download": "timm:resnet18?pretrained=True",
    "a pickle for timm": "timm:resnet18?checkpoint_path=exploded.pth",
}


@pytest.mark.parametrize("text", UNTRUSTED.values(), ids=UNTRUSTED.keys())
def test_a_file_may_name_modules_and_nothing_else(folder, text, capsys):
    (folder / "mine_untrusted.py").write_text("open('exploded', 'w')\ndef make():\n    pass\n")
    with pytest.raises(ArchitectureError, match="not imported|no such class|not a subclass|is an architecture here"):
        build(text, trusted=False)
    assert not (folder / "exploded").exists()
    assert capsys.readouterr().out == ""


def test_a_file_may_name_a_class_that_is_in_the_source(folder):
    (folder / "inner").mkdir()
    (folder / "inner" / "nets.py").write_text("from torch.nn import Linear\nclass Net(Linear):\n    pass\n")
    assert build("inner.nets:Net?in_features=2&out_features=3", trusted=False).out_features == 3
    with pytest.raises(ArchitectureError, match=r"nets\.py has from torch\.nn\.modules\.linear; .*--arch"):
        build("inner.nets:Linear?in_features=2&out_features=3", trusted=False)
    assert builds_by_itself("inner.nets:Net")
    assert not builds_by_itself("torch.nn:Linear")
    assert builds_by_itself("mlp?hidden=3")


def test_a_class_method_builds_for_whoever_names_it(folder):
    """A file may not: it would choose the arguments, and many methods unpickle what they are given the path of."""
    (folder / "made.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    @classmethod\n    def from_name(cls, name, num_classes=4):\n"
        "        return cls({'small': 2}[name], num_classes)\n"
        "    @classmethod\n    def load(cls, path):\n        open(path, 'w')\n"
    )
    text = "made:Net.from_name?name=small"
    assert looks_like_architecture(text)
    for named in (text, "made:Net.load?path=exploded"):
        with pytest.raises(
            ArchitectureError, match="is not a subclass of torch.nn.Module, and a file may name nothing"
        ):
            build(named, trusted=False)
        assert not builds_by_itself(named)
    assert not (folder / "exploded").exists()
    torch.save(build(text, trusted=True).state_dict(), "n.pt")
    assert open_model("n.pt", text).model.out_features == 4
    assert with_outputs(text, 9) == f"{text}&num_classes=9"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("mpl", ArchitectureError, r"Did you mean 'mlp'\?"),
        ("nowhere.at.all:Net", ArchitectureError, "cannot import nowhere.at.all .* PYTHONPATH"),
        ("torch.nn:Lineal", ArchitectureError, "has no Lineal"),
        ("torch:ones", ArchitectureError, "cannot be built|gives a Tensor"),
        ("torchvision:resnet81", ArchitectureError, r"Did you mean 'resnet18'|torchvision has no model 'resnet81'"),
        ("mlp?width=3", ArchitectureError, "mlp has no option .width."),
        ("mlp?in_features=-1", ArchitectureError, "in_features is -1; expected a whole number"),
        ("mlp?hidden", UsageError, "expected key=value"),
    ],
)
def test_architectures_that_are_none(text, error, message):
    with pytest.raises(error, match=message):
        build(text, trusted=True)


def test_completing_an_architecture_from_the_data():
    assert complete("mlp", (1, 28, 28), 10) == "mlp?in_features=784&hidden=256,128&num_classes=10&batch_norm=True"
    assert complete("cnn?num_classes=4", (3, 8, 8), 10) == "cnn?in_channels=3&image_size=8&num_classes=4&dropout=0.0"
    assert complete("torchvision:resnet18", (3, 8, 8), 10) == "torchvision:resnet18?num_classes=10"
    assert complete("a.b:C?x=1", (3,), 10) == "a.b:C?x=1"
    for text in ("mlp", "cnn", "torchvision:resnet18", "a.b:C?x=1"):
        assert looks_like_architecture(text)
    for text in ("model.pt", "folder/model.pt", "C:\\models\\m.pt", "mpl", "a:b:c", "/x:y"):
        assert not looks_like_architecture(text)


def test_importing_the_package_does_not_import_torch():
    code = (
        "import sys, ewc_finetune.cli\n"
        "ewc_finetune.cli.main(['--help'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
