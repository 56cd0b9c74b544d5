"""Anchors on the Hub: through the real client, against a server of the tests' own."""

import pytest

import ewc_finetune as ewc


@pytest.fixture
def anchor(small, samples, tmp_path):
    """The file of an anchor of `small`."""
    return ewc.consolidate(small, samples, name="old", output=tmp_path / "old.anchor.safetensors").path


def test_there_and_back(hub, anchor, tmp_path):
    pushed = ewc.push(anchor, "someone/old")
    assert sorted(hub.files("someone/old")) == [".gitattributes", "README.md", "anchor.safetensors", "importance.png"]
    pulled = ewc.pull(f"hf://{pushed.place.repository}", output=tmp_path / "back.safetensors")
    assert pulled.path.read_bytes() == anchor.read_bytes()
    assert str(pulled.place) == str(pushed.place)
    print(hub.read("someone/old", "README.md").decode())
    for r in hub.requests: print(r)
    again = ewc.push(anchor, "someone/old")
    assert again.changed == []
    assert again.place == pushed.place
