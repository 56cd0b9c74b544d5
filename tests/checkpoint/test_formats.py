"""Every format goes in and comes out: opened, consolidated, fine-tuned, and read again by its own library."""

import json
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict

import pytest
import safetensors.torch
import torch
import torchvision
from support.files import Bomb
from support.models import Small, example, outputs, quiet, trained
from torch import nn
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune.checkpoint import torchvision_models as recognition
from ewc_finetune.checkpoint.builtin_models import MLP
from ewc_finetune.checkpoint.open import load_checkpoint, open_model
from ewc_finetune.errors import AnchorError, ArchitectureError, CheckpointError, StorageError, UsageError
from ewc_finetune.evaluation.cost import host_peak

# Ways to save a model, what its file is called, and how its own library reads it again.


def save_plain(model, path):
    torch.save(model.state_dict(), path)


def save_wrapped(model, path):
    state = OrderedDict((f"module.{name}", tensor) for name, tensor in model.state_dict().items())
    torch.save({"epoch": 7, "state_dict": state, "optimizer": {"lr": 0.1, "state": [torch.ones(2)]}}, path)


def save_lightning(model, path):
    state = OrderedDict((f"model.{name}", tensor) for name, tensor in model.state_dict().items())
    state["criterion.weight"] = torch.arange(3.0)
    torch.save({"state_dict": state, "global_step": 3, "hyper_parameters": {"lr": 0.1}}, path)


def save_safetensors(model, path):
    safetensors.torch.save_file(model.state_dict(), path, {"format": "pt", "author": "somebody"})


def save_sharded(model, path):
    state = model.state_dict()
    names = list(state)
    shards = {"m-00001-of-00002.safetensors": names[::2], "m-00002-of-00002.safetensors": names[1::2]}
    for shard, own in shards.items():
        safetensors.torch.save_file({name: state[name] for name in own}, path.parent / shard, {"format": "pt"})
    weight_map = {name: shard for shard, own in shards.items() for name in own}
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": dict(sorted(weight_map.items()))}))


def save_scripted(model, path):
    with quiet():
        torch.jit.save(torch.jit.script(model), path, _extra_files={"notes.txt": "kept"})


def save_traced(model, path):
    with quiet():
        torch.jit.save(torch.jit.trace(model, example(model, 2)), path)


def save_exported(model, path):
    with quiet():
        batch = torch.export.Dim("batch", min=1, max=4096)
        torch.export.save(torch.export.export(model, (example(model, 2),), dynamic_shapes=({0: batch},)), path)


def save_pickled(model, path):
    torch.save(model, path)


def read_state(key=None, prefix=""):
    def read(path, model):
        found = torch.load(path, weights_only=True)
        state = found if key is None else found[key]
        model.load_state_dict({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})
        return model

    return read


def read_safetensors(path, model):
    model.load_state_dict(safetensors.torch.load_file(path))
    return model


def read_sharded(path, model):
    index = json.loads(path.read_text())
    state = {}
    for shard in set(index["weight_map"].values()):
        state |= safetensors.torch.load_file(path.parent / shard)
    model.load_state_dict(state)
    return model


def read_script(path, _):
    with quiet():
        return torch.jit.load(path)


def read_exported(path, _):
    with quiet():
        return torch.export.load(path).module()


def read_pickled(path, _):
    return torch.load(path, weights_only=False)


FORMATS = {
    "state dict": (save_plain, "m.pt", read_state()),
    "wrapped": (save_wrapped, "m.pth", read_state("state_dict", "module.")),
    "lightning": (save_lightning, "m.ckpt", read_state("state_dict", "model.")),
    "safetensors": (save_safetensors, "m.safetensors", read_safetensors),
    "sharded": (save_sharded, "m.safetensors.index.json", read_sharded),
    "scripted": (save_scripted, "m.pt", read_script),
    "traced": (save_traced, "m.pt", read_script),
    "exported": (save_exported, "m.pt2", read_exported),
    "pickled": (save_pickled, "m.pt", read_pickled),
}
PROGRAMS = ("scripted", "traced", "exported", "pickled")


def small():
    return trained(Small(), torch.float32)


def resnet():
    return trained_images(torchvision.models.resnet18(num_classes=5))


def mobilenet():
    return trained_images(torchvision.models.mobilenet_v3_small(num_classes=5))


def trained_images(model):
    """With statistics that are not those of a fresh model."""
    torch.manual_seed(0)
    model.train()(torch.randn(8, 3, 32, 32))
    return model.eval()


@pytest.mark.parametrize(
    "build", [small, pytest.param(resnet, marks=pytest.mark.slow), pytest.param(mobilenet, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", FORMATS)
def test_in_and_out(tmp_path, kind, build):
    """Zero steps change no output; some steps give what the run had, read by the format's own library."""
    save, file, read = FORMATS[kind]
    torch.manual_seed(0)
    model = build()
    save(model, tmp_path / file)
    inputs = example(model, 6)
    data = TensorDataset(inputs, torch.arange(6) % 3)
    arch = None if kind in PROGRAMS or build is not small else "support.models:Small"
    expected = outputs(model, inputs)
    loaded = open_model(tmp_path / file, arch, trust_code=kind == "pickled")
    torch.testing.assert_close(outputs(loaded.model, inputs), expected)
    folder = tmp_path / "out"
    folder.mkdir()
    options = {"architecture": arch, "trust_code": kind == "pickled", "eval_on": [], "batch_size": 3}
    ewc.finetune(tmp_path / file, data, epochs=0, output=folder / file, **options)
    before, again = read(tmp_path / file, build()), read(folder / file, build())
    assert torch.equal(outputs(again, inputs), outputs(before, inputs))
    consolidating = {name: options[name] for name in ("architecture", "trust_code")}
    anchor = ewc.consolidate(tmp_path / file, data, output=tmp_path / "a.safetensors", **consolidating)
    assert anchor.provenance.checkpoint["format"] == loaded.format
    options |= {"anchors": anchor.path, "lambdas": 1.0, "epochs": 1, "lr": 1e-2, "overwrite": True}
    done = ewc.finetune(tmp_path / file, data, output=folder / file, **options)
    again = read(folder / file, build())
    found = outputs(again, inputs)
    torch.testing.assert_close(found, outputs(done.model, inputs))
    assert not torch.allclose(found, expected, atol=1e-3)
    # What ewc-ft knows of the model is in the file.
    lineage = load_checkpoint(folder / file, trust_code=kind == "pickled").metadata.lineage
    assert [entry["sha256"] for entry in lineage] == [anchor.digest]


@pytest.mark.parametrize("kind", PROGRAMS)
def test_an_anchor_has_no_program(tmp_path, kind):
    save, file, _ = FORMATS[kind]
    model = small()
    save(model, tmp_path / file)
    data = TensorDataset(example(model, 6), torch.arange(6) % 3)
    ewc.consolidate(tmp_path / file, data, output=tmp_path / "a.safetensors", trust_code=True)
    with pytest.raises(AnchorError, match=f"whose program it does not have. Name the checkpoint too: --model {file}"):
        ewc.finetune(None, data, anchors=tmp_path / "a.safetensors")
    with pytest.raises(ArchitectureError, match="leave --arch away"):
        open_model(tmp_path / file, "support.models:Small", trust_code=True)


def test_the_rest_of_the_file_stays_as_it_was(tmp_path):
    """What a trainer, Lightning or somebody else put beside the weights, the names, and the metadata."""
    data = TensorDataset(torch.randn(6, 4), torch.arange(6) % 3)
    for kind in ("wrapped", "lightning", "safetensors"):
        save, file, _ = FORMATS[kind]
        save(small(), tmp_path / file)
        ewc.finetune(
            tmp_path / file,
            data,
            architecture="support.models:Small",
            epochs=1,
            output=tmp_path / f"o-{file}",
            eval_on=[],
            overwrite=True,
        )
    before, after = (torch.load(tmp_path / f"{o}m.pth", weights_only=True) for o in ("", "o-"))
    assert list(before) == list(after)
    assert list(before["state_dict"]) == list(after["state_dict"])
    assert after["optimizer"]["state"][0].tolist() == [1, 1]
    assert after["epoch"] == 7
    after = torch.load(tmp_path / "o-m.ckpt", weights_only=True)
    assert after["state_dict"]["criterion.weight"].tolist() == [0, 1, 2]
    assert after["hyper_parameters"] == {"lr": 0.1}
    with safetensors.safe_open(tmp_path / "o-m.safetensors", "pt") as written:
        metadata = written.metadata()
    assert {key: metadata[key] for key in ("format", "author")} == {"format": "pt", "author": "somebody"}
    # The same run gives the same bytes.
    file = tmp_path / "m.safetensors"
    ewc.finetune(
        file, data, architecture="support.models:Small", epochs=1, output=tmp_path / "p.safetensors", eval_on=[]
    )
    assert (tmp_path / "p.safetensors").read_bytes() == (tmp_path / "o-m.safetensors").read_bytes()


def test_averaged_weights_are_those_that_are_used(tmp_path):
    model, other = small(), trained(Small(), torch.float32, seed=1)
    torch.save({"state_dict": other.state_dict(), "state_dict_ema": model.state_dict()}, tmp_path / "m.pt")
    loaded = open_model(tmp_path / "m.pt", "support.models:Small")
    assert torch.equal(loaded.model.first.weight, model.first.weight)
    assert "its weights are under 'state_dict_ema'" in loaded.remarks[0]


def test_prefixes_of_wrappers_in_wrappers(tmp_path):
    model = small()
    state = {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "m.pt")
    assert torch.equal(open_model(tmp_path / "m.pt", "support.models:Small").model.first.weight, model.first.weight)


def test_an_anchor_keeps_nothing_but_the_weights(tmp_path):
    """What is written from it alone is plain, and that is said."""
    data = TensorDataset(torch.randn(6, 4), torch.arange(6) % 3)
    save_wrapped(small(), tmp_path / "m.pth")
    save_plain(small(), tmp_path / "plain.pt")
    remarks = {}
    for name in ("m.pth", "plain.pt"):
        anchor = ewc.consolidate(
            tmp_path / name, data, architecture="support.models:Small", output=tmp_path / f"{name}.anchor"
        )
        remarks[name] = " ".join(load_checkpoint(anchor.path).remarks)
    assert "the weights under 'state_dict' and behind 'module.', beside what an anchor does not" in remarks["m.pth"]
    assert "To keep the rest: --model m.pth" in remarks["m.pth"]
    assert not remarks["plain.pt"]


def test_tied_weights_are_one(tmp_path):
    """In a safetensors file that has one of their names, and in one that has both."""
    model = TiedNet()
    data = TensorDataset(torch.arange(8) % 5, torch.arange(8) % 5)
    for number, names in enumerate((["embed.weight"], ["embed.weight", "out.weight"])):
        state = {name: model.state_dict()[name].clone() for name in names}
        safetensors.torch.save_file(state, tmp_path / f"{number}.safetensors")
        done = ewc.finetune(
            tmp_path / f"{number}.safetensors",
            data,
            architecture="test_formats:TiedNet",
            lr=0.1,
            epochs=1,
            output=tmp_path / f"{number}-out.safetensors",
            eval_on=[],
        )
        assert sum(1 for _ in done.model.parameters()) == 1
        written = safetensors.torch.load_file(tmp_path / f"{number}-out.safetensors")
        assert list(written) == names
        assert all(torch.equal(tensor, done.model.embed.weight) for tensor in written.values())


class TiedNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.embed(tokens))


def test_half_precision_comes_back_so(tmp_path):
    data = TensorDataset(torch.randn(6, 4), torch.arange(6) % 3)
    for kind in ("safetensors", "scripted", "exported"):
        save, file, read = FORMATS[kind]
        model = nn.Sequential(nn.Linear(4, 3)).to(torch.bfloat16)
        with quiet():
            if kind == "exported":
                batch = {0: torch.export.Dim("batch", min=1, max=64)}
                inputs = torch.randn(2, 4, dtype=torch.bfloat16)
                torch.export.save(torch.export.export(model, (inputs,), dynamic_shapes=(batch,)), tmp_path / file)
            else:
                save(model, tmp_path / file)
        arch = "test_formats:half" if kind == "safetensors" else None
        ewc.finetune(
            tmp_path / file,
            data,
            architecture=arch,
            lr=0.1,
            epochs=1,
            output=tmp_path / f"o-{file}",
            eval_on=[],
            overwrite=True,
        )
        again = read(tmp_path / f"o-{file}", half().to(torch.bfloat16))
        assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
        assert not torch.equal(next(again.parameters()), next(model.parameters()))


class Checked(nn.Module):
    """Makes something of its weights as it is built, and cannot do it of nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        if not self.linear.weight.abs().sum() > 0:
            raise ValueError("no weights")
        self.register_buffer("scale", self.linear.weight.abs().max(), persistent=False)

    def forward(self, x):
        return self.linear(x)


def test_constructors_that_look_at_their_weights(tmp_path):
    model = Checked()
    torch.save(model.state_dict(), tmp_path / "m.pt")
    loaded = open_model(tmp_path / "m.pt", "test_formats:Checked").model
    assert torch.equal(loaded.linear.weight, model.linear.weight)
    assert loaded.scale > 0
    torch.save(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)).state_dict(), tmp_path / "w.pt")
    assert open_model(tmp_path / "w.pt", "test_formats:normed").model(torch.ones(1, 4)).isfinite().all()


def normed():
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))


def half():
    return nn.Sequential(nn.Linear(4, 3))


@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d", "densenet121", "convnext_tiny", "regnet_y_400mf"])
def test_torchvisions_models_are_recognised(name):
    built = recognition.build_empty(torchvision.models.get_model_builder(name))
    shapes = {key: tensor.shape for key, tensor in built.state_dict().items()}
    assert recognition.recognise(shapes) == f"torchvision:{name}?num_classes=1000"
    head = max((key for key in shapes if key.endswith("weight") and shapes[key][0] == 1000), key=list(shapes).index)
    for key in (head, head.replace("weight", "bias")):
        shapes[key] = torch.Size([7, *shapes[key][1:]])
    assert recognition.recognise(shapes) == f"torchvision:{name}?num_classes=7"
    shapes[key] = torch.Size([8])
    assert recognition.recognise(shapes) is None
    old = {key: shape for key, shape in shapes.items() if "num_batches_tracked" not in key}
    assert recognition.digest(old) == recognition.digest(shapes)


@pytest.mark.slow
def test_the_table_is_of_the_torchvision_that_is_installed():
    known = json.loads(recognition._TABLE.read_text())
    made = json.loads(recognition.make_table())
    assert {digest: known.get(digest) for digest in made} == made


@pytest.mark.slow
def test_a_vision_transformer(tmp_path):
    torch.manual_seed(0)
    model = torchvision.models.vit_b_16(num_classes=5)
    torch.nn.init.normal_(model.heads.head.weight, std=0.1)
    model.eval()
    torch.save({"state_dict": model.state_dict()}, tmp_path / "vit.pt")
    inputs = torch.randn(2, 3, 224, 224)
    data = TensorDataset(inputs, torch.tensor([0, 1]))
    anchor = ewc.consolidate(tmp_path / "vit.pt", data, estimator="sampled", output=tmp_path / "a.safetensors")
    assert anchor.provenance.checkpoint["architecture"] == "torchvision:vit_b_16?num_classes=5"
    held = {"anchors": anchor.path, "epochs": 1, "lr": 1e-4, "batch_size": 2, "eval_on": []}
    done = ewc.finetune(tmp_path / "vit.pt", data, output=tmp_path / "out.pt", **held)
    model.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True)["state_dict"])
    torch.testing.assert_close(outputs(model, inputs), outputs(done.model, inputs))


def test_what_no_program_can_be_trained_with(tmp_path):
    model = small()
    with quiet():
        torch.jit.save(torch.jit.freeze(torch.jit.script(model)), tmp_path / "frozen.pt")
        batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
        training = torch.export.export(Small().train(), (torch.randn(3, 4),), dynamic_shapes=batch)
        torch.export.save(training, tmp_path / "training.pt2")
        torch.export.save(torch.export.export(model, (torch.randn(3, 4),)), tmp_path / "static.pt2")
    with pytest.raises(ArchitectureError, match="has no parameters: torch.jit.freeze made its weights constants"):
        open_model(tmp_path / "frozen.pt")
    with pytest.raises(ArchitectureError, match=r"was exported in training mode: \w+ acts at every call"):
        open_model(tmp_path / "training.pt2")
    with pytest.raises(ArchitectureError, match="was exported for batches of exactly 3"):
        open_model(tmp_path / "static.pt2")


def test_what_an_export_baked_in_is_said(tmp_path):
    save_exported(small(), tmp_path / "m.pt2")
    (remark,) = open_model(tmp_path / "m.pt2").remarks
    assert remark.endswith("dropout stays off and normalisation statistics stay as they are, in training too")


@pytest.mark.parametrize(
    "wrap", [lambda b: {"state_dict": {"w": b}}, lambda b: {"model": {"w": torch.ones(1)}, "x": b}]
)
def test_no_code_runs_in_wrappers(tmp_path, monkeypatch, wrap):
    monkeypatch.chdir(tmp_path)
    torch.save(wrap(Bomb()), "m.pt")
    with pytest.raises(CheckpointError, match=r"asks for more than tensors .*system.*--trust-code"):
        load_checkpoint("m.pt")
    assert not (tmp_path / "exploded").exists()


def test_code_runs_for_those_who_trust_it(tmp_path):
    save_pickled(small(), tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"support.models.Small.*--trust-code"):
        open_model(tmp_path / "m.pt")
    assert isinstance(open_model(tmp_path / "m.pt", trust_code=True).model, Small)


def test_the_option_is_known_by_its_old_word(ewc_ft, tmp_path):
    save_pickled(small(), tmp_path / "p.pt")
    assert json.loads(ewc_ft("inspect", "p.pt", "--trust-pickle", "--json").stdout)["format"] == "pickled module"
    assert "--trust-pickle" not in ewc_ft("inspect", "--help").output


def rewritten(path, change):
    """The members of an archive, changed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    out = path.with_name("changed.pt")
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            change(archive, name, content)
    return out


def test_archives_that_were_made_to_do_harm(tmp_path, monkeypatch):
    save_plain(small(), tmp_path / "m.pt")

    def outside(archive, name, content):
        archive.writestr(name.replace("m/data/0", "m/../../evil"), content)

    with pytest.raises(CheckpointError, match=r"made to do harm: its archive names 'm/../../evil'"):
        load_checkpoint(rewritten(tmp_path / "m.pt", outside))
    monkeypatch.setattr("ewc_finetune.checkpoint.formats.archive._LARGEST_PACKED", 1000)

    def packed(archive, name, content):
        archive.writestr(name, content.ljust(2000, b"\0"), zipfile.ZIP_DEFLATED)

    with pytest.raises(CheckpointError, match=r"bytes of its archive are packed"):
        load_checkpoint(rewritten(tmp_path / "m.pt", packed))

    def larger(archive, name, content):
        archive.writestr(name, content.replace(b"K\x04", b"\x8a\x06" + (10**13).to_bytes(6, "little")))

    with pytest.raises(CheckpointError, match="is not a checkpoint that can be read"):
        load_checkpoint(rewritten(tmp_path / "m.pt", larger))


def test_safetensors_that_are_none(tmp_path):
    save_safetensors(small(), tmp_path / "m.safetensors")
    whole = (tmp_path / "m.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["first.weight"]["shape"] = [10**6, 10**6]
    lying = json.dumps(header).encode()
    for content in (
        whole[: len(whole) // 2],
        whole[: length // 2],
        len(lying).to_bytes(8, "little") + lying + whole[8 + length :],
        (2**40).to_bytes(8, "little") + whole[8:],
        b"\x02\0\0\0\0\0\0\0{}",
    ):
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
            open_model(tmp_path / "bad.safetensors", "support.models:Small")


def test_shards_that_do_not_fit_their_index(tmp_path):
    index = tmp_path / "m.safetensors.index.json"
    save_sharded(small(), index)
    known = json.loads(index.read_text())

    def refused(weight_map, message):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(index)

    refused({**known["weight_map"], "more": "../m.safetensors"}, "names a shard '../m.safetensors', which is no file")
    refused({**known["weight_map"], "more": "m-3.safetensors"}, "names m-3.safetensors, which is not beside it")
    refused({**known["weight_map"], "more": "m-00001-of-00002.safetensors"}, "more is not in the file that should")
    index.write_text(json.dumps(known))
    data = TensorDataset(torch.randn(6, 4), torch.arange(6) % 3)
    options = {"architecture": "support.models:Small", "epochs": 0, "eval_on": []}
    with pytest.raises(UsageError, match=r"is an index of shards; let it end in .safetensors.index.json"):
        ewc.finetune(index, data, output=tmp_path / "out.safetensors", **options)
    (tmp_path / "o-00002-of-00002.safetensors").write_text("mine")
    with pytest.raises(StorageError, match=r"o-00002-of-00002.safetensors exists"):
        ewc.finetune(index, data, output=tmp_path / "o.safetensors.index.json", **options)


def test_the_default_output_is_in_the_same_format(ewc_ft, tmp_path):
    model = MLP(64, (8,), 10)
    save_safetensors(model, tmp_path / "w.safetensors")
    with quiet():
        torch.jit.save(torch.jit.trace(model.eval(), torch.randn(2, 64)), tmp_path / "m.pt")
    arch = "mlp?in_features=64&hidden=8&num_classes=10"
    data = ("--data", "digits?limit=40")
    ewc_ft("consolidate", "w.safetensors", "--arch", arch, *data)
    done = ewc_ft("finetune", "--anchors", "w.anchor.safetensors", *data, "--epochs", "1", "--json")
    document = json.loads(done.stdout)
    assert document["checkpoint"] == "w-digits-limit-40.safetensors"
    again = ewc_ft("consolidate", "w.anchor.safetensors", "--data", "digits?rotate=90&limit=40", "--json")
    assert json.loads(again.stdout)["anchor"] == "w-digits-rotate-90-limit-40.anchor.safetensors"
    safetensors.torch.load_file(tmp_path / document["checkpoint"])
    ewc_ft("consolidate", "m.pt", *data)
    refused = ewc_ft("finetune", "--anchors", "m.anchor.safetensors", *data, expect=1)
    assert "comes from a checkpoint in the format torchscript, whose program it does not have" in refused.stderr
    done = ewc_ft("finetune", "--anchors", "m.anchor.safetensors", "--model", "m.pt", *data, "--epochs", "1", "--json")
    read_script(tmp_path / json.loads(done.stdout)["checkpoint"], None)


@pytest.mark.parametrize(
    ("kind", "name"), [("wrapped", "state_dict"), ("scripted", "torchscript"), ("exported", "torch.export")]
)
def test_inspecting_a_checkpoint(ewc_ft, tmp_path, kind, name):
    save, file, _ = FORMATS[kind]
    save(small(), tmp_path / file)
    arch = () if kind in PROGRAMS else ("--arch", "support.models:Small")
    found = json.loads(ewc_ft("inspect", file, *arch, "--json").stdout)
    assert found["format"] == name
    assert found["architecture"] == (None if kind in PROGRAMS else "support.models:Small")
    numbers = sum(tensor.numel() for tensor in small().state_dict().values() if tensor.is_floating_point())
    assert found["weights"]["float32"]["numbers"] == numbers
    assert found["weights"]["float32"]["bytes"] == 4 * numbers
    assert found["normalisation"] == ["norm"]
    text = ewc_ft("inspect", file, *arch).stderr
    assert f"format         {name}" in text
    refused = ewc_ft("inspect", file, "--plot", "p.png", expect=2)
    assert "which has no importance to draw" in refused.stderr


def test_inspecting_what_cannot_be_opened(ewc_ft, tmp_path):
    torch.save({"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2).half()}, tmp_path / "m.pt")
    text = ewc_ft("inspect", "m.pt").stderr
    assert "architecture   m.pt does not say what architecture its weights belong to" in text
    assert "float16        2 numbers in 1 tensor, 4 bytes" in text
    save_pickled(small(), tmp_path / "p.pt")
    found = json.loads(ewc_ft("inspect", "p.pt", "--json").stdout)
    assert "support.models.Small" in found["unsafe"]
    found = json.loads(ewc_ft("inspect", "p.pt", "--trust-code", "--json").stdout)
    assert found["format"] == "pickled module"
    assert found["normalisation"] == ["norm"]
    tied = TiedNet()
    torch.save(tied.state_dict(), tmp_path / "t.pt")
    found = json.loads(ewc_ft("inspect", "t.pt", "--json").stdout)
    assert found["tied"] == [["embed.weight", "out.weight"]]
    assert found["weights"]["float32"]["numbers"] == 20


def test_outputs_that_are_named_for_another_format(tmp_path):
    data = TensorDataset(torch.randn(6, 4), torch.arange(6) % 3)
    for kind, output in (("safetensors", "o.pt"), ("state dict", "o.safetensors"), ("scripted", "o.safetensors")):
        save, file, _ = FORMATS[kind]
        save(small(), tmp_path / file)
        arch = None if kind in PROGRAMS else "support.models:Small"
        with pytest.raises(UsageError, match="is to be a checkpoint in the format"):
            ewc.finetune(tmp_path / file, data, architecture=arch, output=tmp_path / output)
    anchor = ewc.consolidate(
        tmp_path / "m.safetensors", data, architecture="support.models:Small", output=tmp_path / "a.safetensors"
    )
    with pytest.raises(UsageError, match=r"in the format safetensors; let it end in .safetensors"):
        ewc.merge([anchor], checkpoint=tmp_path / "o.pt", architecture="support.models:Small")
    ewc.merge([anchor], checkpoint=tmp_path / "c.safetensors", architecture="support.models:Small")
    assert set(safetensors.torch.load_file(tmp_path / "c.safetensors")) == set(small().state_dict())


def test_what_stands_behind_a_prefix_is_said(tmp_path):
    save_lightning(small(), tmp_path / "m.ckpt")
    remarks = open_model(tmp_path / "m.ckpt", "support.models:Small").remarks
    assert remarks[-1].endswith("its names stand behind 'model.'; 1 tensor of other names left alone")


WIDE = "mlp?in_features=2048&hidden=2048,2048,2048,2048&num_classes=16&batch_norm=false"
LOADING = """
import sys
from ewc_finetune.checkpoint.open import open_model
from ewc_finetune.evaluation.cost import host_peak as peak
open_model(sys.argv[1], sys.argv[2])
before = peak()
model = open_model(sys.argv[3], sys.argv[4] or None, trust_code=True).model
print((peak() - before) / sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["state dict", "half", "sharded", "exported"])
def test_loading_takes_one_copy_of_the_weights_beyond_the_model(tmp_path, kind):
    save, file, _ = FORMATS["state dict" if kind == "half" else kind]
    tiny, wide = MLP(4, 4, 2), MLP(2048, (2048,) * 4, 16, batch_norm=False)
    example_input = torch.randn(2, 2048)
    torch.save(tiny.state_dict(), tmp_path / "tiny.pt")
    with quiet():
        if kind == "exported":
            batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
            torch.export.save(torch.export.export(wide, (example_input,), dynamic_shapes=batch), tmp_path / file)
        else:
            save(wide.half() if kind == "half" else wide, tmp_path / file)
    arch = "" if kind in PROGRAMS else WIDE
    paths = [tmp_path / "tiny.pt", "mlp?in_features=4&hidden=4&num_classes=2", tmp_path / file, arch]
    command = [sys.executable, "-W", "ignore", "-c", LOADING, *paths]
    assert 0.9 < float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) < 2.4


@pytest.mark.parametrize("numel", [10**9, 10**14])
def test_an_older_pickle_whose_storage_claims_to_be_larger_than_it_is(tmp_path, numel):
    torch.save({"w": torch.arange(30.0)}, tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "m.pt").read_bytes()
    place = content.index(b"K\x1e", content.index(b"cpu"))
    claimed = b"\x8a\x08" + struct.pack("<q", numel)
    (tmp_path / "m.pt").write_bytes(content[:place] + claimed + content[place + 2 :])
    before = host_peak()
    with pytest.raises(CheckpointError, match="wrong byte size|can't allocate memory"):
        load_checkpoint(tmp_path / "m.pt")
    assert host_peak() - before < 100e6


class Blur(nn.Module):
    """Has a buffer that is not saved, of what a parameter was set to."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Linear(4, 3)
        nn.init.constant_(self.conv.weight, 0.25)
        self.register_buffer("kernel", self.conv.weight.detach().clone(), persistent=False)

    def forward(self, x):
        return self.conv(x) + x @ self.kernel.T


def test_what_a_constructor_sets_is_set(tmp_path):
    model = Blur()
    nn.init.normal_(model.conv.weight)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    loaded = open_model(tmp_path / "m.pt", "test_formats:Blur").model
    assert torch.equal(loaded(torch.ones(2, 4)), model(torch.ones(2, 4)))


def lazy():
    return nn.Sequential(nn.LazyLinear(3))


def test_layers_without_a_shape(tmp_path):
    torch.save(nn.Sequential(nn.Linear(4, 3)).state_dict(), tmp_path / "m.pt")
    with pytest.raises(ArchitectureError, match=r"0.weight of test_formats:lazy has no shape before its first batch"):
        open_model(tmp_path / "m.pt", "test_formats:lazy")


@pytest.mark.parametrize("kind", PROGRAMS)
def test_what_is_frozen_in_the_file_stays_frozen(tmp_path, kind):
    save, file, read = FORMATS[kind]
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)) if kind != "scripted" else small()
    first = next(name for name, _ in model.named_parameters())
    model.get_parameter(first).requires_grad_(False)
    data = TensorDataset(torch.randn(6, 4), torch.arange(6) % 3)
    with quiet():
        if kind == "exported":
            batch = torch.export.Dim("batch", min=1, max=64)
            torch.export.save(
                torch.export.export(model, (torch.randn(2, 4),), dynamic_shapes=({0: batch},)), tmp_path / file
            )
        elif kind == "traced":
            torch.jit.save(torch.jit.trace(model, torch.randn(2, 4)), tmp_path / file)
        else:
            save(model, tmp_path / file)
    anchor = ewc.consolidate(tmp_path / file, data, trust_code=True)
    assert anchor.provenance.excluded == {first: "frozen (requires_grad is false)"}
    folder = tmp_path / "out"
    folder.mkdir()
    ewc.finetune(tmp_path / file, data, trust_code=True, lr=0.1, output=folder / file, eval_on=[])
    written = dict(read(folder / file, model).named_parameters())
    assert torch.equal(written[first], model.get_parameter(first))


def test_an_index_that_is_damaged_or_does_not_name_all(tmp_path):
    save_sharded(small(), tmp_path / "m.safetensors.index.json")
    shard = tmp_path / "m-00001-of-00002.safetensors"
    safetensors.torch.save_file({**safetensors.torch.load_file(shard), "extra": torch.ones(2)}, shard)
    data = TensorDataset(torch.randn(6, 4), torch.arange(6) % 3)
    out = tmp_path / "out"
    out.mkdir()
    options = {"architecture": "support.models:Small", "epochs": 0, "eval_on": []}
    ewc.finetune(tmp_path / "m.safetensors.index.json", data, output=out / "m.safetensors.index.json", **options)
    assert safetensors.torch.load_file(out / shard.name)["extra"].tolist() == [1, 1]
    index = json.loads((tmp_path / "m.safetensors.index.json").read_text())
    index["weight_map"]["first.weight"] = ["a", "b"]
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="its weight_map should name a file for each tensor"):
        load_checkpoint(tmp_path / "m.safetensors.index.json")
