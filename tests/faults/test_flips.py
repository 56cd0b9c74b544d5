"""One bit is flipped somewhere in a file: it is refused, or remarked on, or what is read is the same to the bit."""

import random

import archives
import pytest
import torch
from sizes import times
from support.models import Small, trained
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune.checkpoint.open import load_checkpoint
from ewc_finetune.errors import EwcError
from ewc_finetune.storage.safetensors_source import FileSource
from ewc_finetune.storage.shards import cut

FLIPS = times(100, 4000)


def flipped(content: bytes, random_bits: random.Random) -> bytes:
    at = random_bits.randrange(len(content) * 8)
    changed = bytearray(content)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A file of each format that this tool writes, and what is read from it."""
    folder = tmp_path_factory.mktemp("originals")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
    model = trained(Small(), torch.float32)
    ewc.consolidate(model, data, output=folder / "anchor.safetensors", curvature="kfac", probe=2)
    cut(FileSource(folder / "anchor.safetensors"), folder, "parts", 200)
    torch.save(model.state_dict(), folder / "state.pt")
    archives.script(folder / "script.pt", archives.Plain("m"))
    archives.export(folder / "exported.pt2")
    for name, kind in (("weights.safetensors", "safetensors"), ("w.pt", "state_dict")):
        source = folder / f"source.{name}"
        if kind == "safetensors":
            import safetensors.torch

            safetensors.torch.save_file(dict(model.state_dict()), source)
        else:
            torch.save(model.state_dict(), source)
        options = {"architecture": "support.models:Small", "epochs": 0, "eval_on": []}
        ewc.finetune(source, data, output=folder / name, **options)
    return folder


def content_of(path):
    """Everything that is read from a file, with the remarks."""
    if path.name.startswith(("anchor", "parts")):
        anchor = ewc.Anchor.load(path)
        tensors = {
            **{f"weights.{name}": tensor for name, tensor in anchor.weights.items()},
            **{f"fisher.{name}": tensor for name, tensor in anchor.fisher.items()},
            **{f"buffers.{name}": tensor for name, tensor in anchor.buffers.items()},
            **{f"blocks.{n}.{side}": getattr(b, side).matrix() for n, b in anchor.blocks.items() for side in SIDES},
            **{f"probe.{number}": probe.outputs for number, probe in enumerate(anchor.probes)},
        }
        return tensors, anchor.metadata, anchor.remarks
    checkpoint = load_checkpoint(path)
    state = checkpoint.state or checkpoint.build(None)[0].state_dict()
    return dict(state), checkpoint.metadata.to_json(), ()


SIDES = ("input", "output")


def is_same(found, expected) -> bool:
    """Whether two readings are the same; one with a remark that the other has not is another, and is noticed."""
    tensors, told, remarks = found
    if remarks != expected[2]:
        return True
    return (
        told == expected[1]
        and tensors.keys() == expected[0].keys()
        and all(torch.equal(tensor, expected[0][name]) for name, tensor in tensors.items())
    )


@pytest.mark.parametrize(
    "name",
    [
        "anchor.safetensors",
        "parts-00001",
        "parts.safetensors.index.json",
        "weights.safetensors",
        "w.pt",
        "state.pt",
        "script.pt",
        "exported.pt2",
    ],
)
def test_no_flip_goes_unnoticed(originals, tmp_path, name):
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in originals.iterdir():
        if file.is_file() and (file.name.startswith("parts") if name.startswith("parts") else file.name == name):
            (folder / file.name).write_bytes(file.read_bytes())
    changed = next(file for file in folder.iterdir() if file.name.startswith(name))
    opened = folder / "parts.safetensors.index.json" if name.startswith("parts") else changed
    whole, expected = changed.read_bytes(), content_of(opened)
    noticed = 0
    for seed in FLIPS:
        changed.write_bytes(flipped(whole, random.Random(seed)))
        try:
            found = content_of(opened)
        except EwcError:
            noticed += 1
            continue
        assert is_same(found, expected), f"seed {seed}"
    assert noticed > len(FLIPS) / 3  # the others are in what nobody reads: padding, times of members


def test_a_flip_in_the_name_of_the_checksums_is_noticed(originals, tmp_path):
    for name in ("anchor.safetensors", "weights.safetensors"):
        content = (originals / name).read_bytes()
        (tmp_path / name).write_bytes(content.replace(b"ewc_checksums", b"ewc_checksumr"))
        with pytest.raises(EwcError, match="its header is not as it was written"):
            content_of(tmp_path / name)


def test_inspect_says_whether_a_file_is_as_it_was_written(originals, ewc_ft, tmp_path):
    for name, told in (
        ("anchor.safetensors", "all that is read of it is as it was written, by its checksums; sha256 "),
        ("parts.safetensors.index.json", "all that is read of it is as it was written, by its checksums; sha256 "),
        ("weights.safetensors", "all that is read of it is as it was written, by its checksums"),
        ("source.weights.safetensors", "it can be read, and has no checksums to compare it with"),
        ("state.pt", "all that is read of it is as it was written, by its checksums"),
        ("exported.pt2", "all that is read of it is as it was written, by its checksums"),
    ):
        assert told in ewc_ft("inspect", originals / name, "--verify").stderr
        assert "verified" not in ewc_ft("inspect", originals / name).stderr
    content = bytearray((originals / "anchor.safetensors").read_bytes())
    content[-3] ^= 1
    (tmp_path / "a.safetensors").write_bytes(content)
    assert "is not as it was written" in ewc_ft("inspect", "a.safetensors", "--verify", expect=1).stderr


def test_what_another_tool_kept_metadata_of_is_refused_with_the_remedy(originals, tmp_path):
    import safetensors
    import safetensors.torch

    with safetensors.safe_open(originals / "weights.safetensors", "pt") as file:
        metadata = file.metadata()
    state = safetensors.torch.load_file(originals / "weights.safetensors")
    state["last.bias"] += 1
    safetensors.torch.save_file(state, tmp_path / "w.safetensors", metadata)
    with pytest.raises(EwcError, match=r"last.bias is not as it was written.*leave 'ewc_checksums' out"):
        load_checkpoint(tmp_path / "w.safetensors")
    metadata.pop("ewc_checksums")
    safetensors.torch.save_file(state, tmp_path / "w.safetensors", metadata)
    assert torch.equal(load_checkpoint(tmp_path / "w.safetensors").state["last.bias"], state["last.bias"])
