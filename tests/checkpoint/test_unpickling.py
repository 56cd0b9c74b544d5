"""Pickles that ask for more work than a checkpoint takes: refused before any of it is done."""

import zipfile

import pytest
import torch
from torch import nn

from ewc_finetune.checkpoint.formats import unpickling
from ewc_finetune.checkpoint.formats.unpickling import NoPickleError, check_pickle
from ewc_finetune.checkpoint.open import globals_asked_for, load_checkpoint
from ewc_finetune.errors import CheckpointError

START = b"\x80\x02"
DOUBLED = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))
HOSTILE = {
    "lists within one another": START + b"(" * 2_000_000 + b"l" * 2_000_000 + b".",
    "lists that wait for one another": START + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "tuples within one another": START + b"N" + b"\x85" * 1_000_000 + b".",
    "a key that is a million deep": START + b"}N" + b"\x85" * 1_000_000 + b"Ns.",
    "a key of more parts than there is time": START + b"}N" + DOUBLED + b"Ns.",
    "a key in the middle of an entry": START + b"}(N" + DOUBLED + b"Nu.",
    "more steps than a model has": START + b"]" + (b"(" + b"N" * 9_000 + b"e") * 25 + b".",
    "a name deep within itself": START + b"}(" + b"N" + b"\x85" * 101 + b"Nu.",
}


def archive(path, pickled):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
    return path


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "bare"])
@pytest.mark.parametrize("pickled", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_pickles_are_refused_before_they_are_read(tmp_path, pickled, zipped, monkeypatch):
    path = tmp_path / "m.pt"
    archive(path, pickled) if zipped else path.write_bytes(pickled)
    monkeypatch.setattr(unpickling, "_MOST_OPCODES", 200_000)  # of which there are ten times as many, to save time
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(CheckpointError, match=r"made to do harm, or holds more than a model: its pickle has"):
        load_checkpoint(path)
    assert globals_asked_for(path) == []


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "before 1.6"])
def test_real_checkpoints_pass(tmp_path, zipped):
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(300)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    document = {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": [float(i) for i in range(12_000)],
        "names": {f"token {i}": (i, (i,)) for i in range(6_000)},
    }
    torch.save(document, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    check_pickle(tmp_path / "m.pt")
    assert len(load_checkpoint(tmp_path / "m.pt").state) == 600


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "bare"])
def test_what_cannot_be_followed_is_not_loaded(tmp_path, zipped, monkeypatch):
    """Names beyond ASCII are some to torch's unpickler, and none to pickletools: what follows would not be counted."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    hidden = START + "cm\nK\u00e4se\n".encode() + b"N" + b"\x85" * 1_000 + b"."
    for content in (b"hello", b"\x80\x02", b"a", hidden):
        archive(tmp_path / "m.pt", content) if zipped else (tmp_path / "m.pt").write_bytes(content)
        with pytest.raises(NoPickleError):
            check_pickle(tmp_path / "m.pt")
        with pytest.raises(CheckpointError, match=r"is not a checkpoint"):
            load_checkpoint(tmp_path / "m.pt")
        assert globals_asked_for(tmp_path / "m.pt") == []


def test_what_leads_nowhere_is_for_torch_to_say(tmp_path):
    (tmp_path / "m.pt").write_bytes(START + b"h\x07.")
    check_pickle(tmp_path / "m.pt")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "m.pt")


def test_every_pickle_of_an_old_file_is_followed(tmp_path):
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "m.pt").read_bytes()
    parts = content.split(b".\x80\x02")
    assert len(parts) == 5
    parts[4] = HOSTILE["a key that is a million deep"][2:]
    (tmp_path / "m.pt").write_bytes(b".\x80\x02".join(parts))
    with pytest.raises(CheckpointError, match=r"its pickle has tuples of tuples"):
        load_checkpoint(tmp_path / "m.pt")


def test_what_to_save_is_an_entry_that_has_weights(tmp_path):
    weights = nn.Linear(2, 2).state_dict()
    torch.save({"epoch": 3, "net": weights}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"'epoch' is a int.* weights_only=True\)\['net'\], 'weights.pt'\)"):
        load_checkpoint(tmp_path / "m.pt")
    torch.save({"epoch": 3}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"It has no weights by name; save them: torch\.save\(model"):
        load_checkpoint(tmp_path / "m.pt")
