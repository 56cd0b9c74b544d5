"""Anchors on the Hub: through the real client, against a server of the tests' own."""

import io
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hub_server import TOKEN
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import ROOT, TESTS
from support.files import save_changed
from support.models import Small, trained

import ewc_finetune as ewc
from ewc_finetune.commands.push import parse_size
from ewc_finetune.errors import AnchorError, HubError, StorageError, UsageError, redacted
from ewc_finetune.hub.address import HubAddress, is_address, parse_address
from ewc_finetune.hub.client import UnreachableError

NAME = "someone/old"


@pytest.fixture
def anchor(small, samples, tmp_path):
    """The file of an anchor of `small`."""
    return ewc.consolidate(
        small, samples, name="old", architecture="support.models:Small", output=tmp_path / "old.anchor.safetensors"
    ).path


@pytest.fixture
def pushed(hub, anchor):
    """Where it is on the Hub, of which nothing has been asked yet otherwise."""
    place = ewc.push(anchor, NAME).place
    hub.clear()
    return place


@pytest.fixture
def offline(monkeypatch):
    """Call to go offline."""
    return lambda: monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def cache():
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def left_over():
    """What a download that failed would leave in the cache."""
    return [path for path in cache().rglob("*") if path.is_file() and "incomplete" in path.name]


def fresh_cache():
    shutil.rmtree(cache(), ignore_errors=True)


def test_there_and_back(hub, anchor, tmp_path):
    pushed = ewc.push(anchor, NAME)
    assert sorted(hub.files(NAME)) == [".gitattributes", "README.md", "anchor-importance.png", "anchor.safetensors"]
    assert pushed.changed == ["README.md", "anchor-importance.png", "anchor.safetensors"]
    assert pushed.url == f"{hub.url}/{NAME}"
    pulled = ewc.pull(f"hf://{NAME}", output=tmp_path / "back.safetensors")
    assert pulled.path.read_bytes() == anchor.read_bytes()
    assert pulled.place == pushed.place == HubAddress(NAME, hub.commits(NAME)[0].oid, "anchor.safetensors")
    assert pulled.digest == pushed.digest == ewc.Anchor.open(anchor).digest


def test_nothing_has_changed(hub, pushed, anchor, small, samples):
    again = ewc.push(anchor, NAME)
    assert (again.changed, again.place) == ([], pushed)
    assert len(hub.commits(NAME)) == 2  # the first is the Hub's own
    assert not hub.asked("POST .*/commit")
    other = ewc.consolidate(small, samples, name="old", estimator="empirical", architecture="support.models:Small")
    assert ewc.push(other, NAME).changed == ["README.md", "anchor-importance.png", "anchor.safetensors"]


def test_what_people_wrote_on_the_card_stays(hub, pushed, anchor):
    card = hub.read(NAME, "README.md").decode()
    own = card.replace("# old\n", "# Ours\n\nAsk Ada before you use it.\n").replace("- ewc\n", "- ewc\n- ours\n")
    hub.put(NAME, {"README.md": own.encode()})
    assert ewc.push(anchor, NAME).changed == []
    assert ewc.push(anchor, NAME, license="mit").changed == ["README.md"]
    assert ewc.push(anchor, NAME).changed == []  # what the card says of the licence stays
    with pytest.raises(HubError, match=r"says license: mit, not apache-2.0. Change it there"):
        ewc.push(anchor, NAME, license="apache-2.0")
    with pytest.raises(UsageError, match="is no licence that the Hub knows"):
        ewc.push(anchor, NAME, license="a b")
    card = hub.read(NAME, "README.md").decode()
    assert "Ask Ada before you use it." in card
    assert "- ours\n" in card
    assert "license: mit\n" in card


def test_the_command_line(hub, anchor, ewc_ft, tmp_path):
    done = ewc_ft("push", anchor, NAME, "--private", "--message", "The first", "--json")
    document = json.loads(done.stdout)
    commit = hub.commits(NAME)[0]
    assert document["hub"] == f"hf://{NAME}@{commit.oid}/anchor.safetensors"
    assert commit.title == "The first"
    assert hub.repos[NAME].private
    assert f"{hub.url}/{NAME}: README.md, anchor-importance.png, anchor.safetensors" in done.stderr
    assert "nothing has changed: no commit" in ewc_ft("push", anchor, NAME).stderr
    anchor.unlink()  # which is called as what is pulled
    pulled = json.loads(ewc_ft("pull", f"hf://{NAME}", "--json").stdout)
    assert pulled == {
        "schema": "ewc-ft/pull/1",
        "command": "pull",
        "anchor": "old.anchor.safetensors",
        "hub": document["hub"],
        "bytes": (tmp_path / "old.anchor.safetensors").stat().st_size,
        "sha256": document["sha256"],
    }


def test_pull_overwrites_only_when_told(hub, pushed, ewc_ft, tmp_path):
    (tmp_path / "old.anchor.safetensors").write_bytes(b"mine")
    assert "old.anchor.safetensors exists" in ewc_ft("pull", NAME, expect=1).output
    assert not hub.requests
    assert (tmp_path / "old.anchor.safetensors").read_bytes() == b"mine"
    ewc_ft("pull", NAME, "--overwrite")
    assert ewc.Anchor.open(tmp_path / "old.anchor.safetensors").provenance.name == "old"
    ewc_ft("pull", f"{pushed}", "--output", "other.safetensors")
    assert (tmp_path / "other.safetensors").read_bytes() == (tmp_path / "old.anchor.safetensors").read_bytes()


def test_branches_and_pull_requests(hub, pushed, anchor, small, samples):
    other = ewc.consolidate(small, samples, name="other", architecture="support.models:Small")
    branch = ewc.push(other, NAME, revision="next").place
    assert hub.commits(NAME)[0].oid == pushed.revision
    assert hub.commits(NAME, "next")[0].oid == branch.revision
    assert ewc.Anchor.open(f"hf://{NAME}@next").provenance.name == "other"
    assert ewc.Anchor.open(f"hf://{NAME}").provenance.name == "old"
    asked = ewc.push(other, NAME, create_pr=True)
    assert asked.url.endswith(f"/{NAME}/discussions/1")
    assert hub.commits(NAME)[0].oid == pushed.revision
    assert ewc.Anchor.open(f"hf://{NAME}@refs/pr/1").digest == asked.digest
    with pytest.raises(HubError, match="no repository someone/none"):
        ewc.push(other, "someone/none", create_pr=True)


def test_samples_are_not_pushed_unasked(hub, small, samples, tmp_path):
    held = ewc.consolidate(small, samples, name="old", probe=4, output=tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match=r"holds 4 samples .* --probes or --no-probes"):
        ewc.push(held.path, NAME)
    assert NAME not in hub.repos
    ewc.push(held.path, NAME, probes=False)
    without = ewc.Anchor.open(f"hf://{NAME}")
    assert not without.probes
    assert without.digest == held.without_probes().save(tmp_path / "b.safetensors").digest
    assert ewc.push(held, NAME, probes=True).digest == held.digest
    assert len(ewc.Anchor.open(f"hf://{NAME}").probes) == 1
    # An anchor of which samples were left out in memory is not the file that it was loaded from.
    ewc.push(held.without_probes(), NAME)
    assert not ewc.Anchor.open(f"hf://{NAME}").probes


def test_what_is_left_out_is_all_that_is_not_an_anchors(hub, small, samples, tmp_path):
    held = ewc.consolidate(small, samples, name="old", probe=4, output=tmp_path / "a.safetensors")
    with safe_open(held.path, framework="pt") as file:
        metadata = file.metadata()
    save_changed({**load_file(held.path), "samples.0": torch.ones(3)}, tmp_path / "b.safetensors", metadata)
    ewc.push(tmp_path / "b.safetensors", NAME, probes=False)
    found = ewc.Anchor.open(ewc.pull(NAME, output=tmp_path / "c.safetensors").path)
    assert not found.probes
    assert not [name for name in load_file(found.path) if name.startswith(("probe", "samples"))]


def test_a_figure_that_means_nothing_goes(hub, pushed, small, samples):
    done = ewc.push(ewc.consolidate(small, samples, curvature="identity"), NAME)
    assert done.removed == ["anchor-importance.png"]
    assert "Where the importance sits" not in hub.read(NAME, "README.md").decode()


def test_a_branch_that_may_not_be_made(hub, anchor, ewc_ft):
    hub.fail("POST .*/branch", status=403, times=None)
    said = ewc_ft("push", anchor, NAME, "--revision", "x", expect=1).output
    assert "someone/old was made, and nothing was pushed to it" in said


def test_bars_are_left_as_they_were(hub, pushed):
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    disable_progress_bars("peft.foo")
    try:
        ewc.Anchor.open(f"hf://{NAME}")
        assert are_progress_bars_disabled("peft.foo")
        assert not are_progress_bars_disabled()
    finally:
        enable_progress_bars()


def test_private_is_for_what_is_made(hub, pushed, anchor, ewc_ft):
    assert "was there already, and is public" in ewc_ft("push", anchor, NAME, "--private").stderr


# Anchors in parts.


@pytest.mark.parametrize("size", [1, 100, 700])
def test_parts(hub, anchor, tmp_path, size):
    """However an anchor is cut, it is the same one."""
    done = ewc.push(anchor, NAME, max_shard_size=size)
    names = [name for name in hub.files(NAME) if name.startswith("anchor-0")]
    assert len(names) > 1
    assert done.place.file == "anchor.safetensors.index.json"
    assert ewc.pull(f"hf://{NAME}", output=tmp_path / "back").path.read_bytes() == anchor.read_bytes()
    whole, parts = ewc.Anchor.load(anchor), ewc.Anchor.load(f"hf://{NAME}")
    assert parts.digest == whole.digest
    assert parts.provenance == whole.provenance
    for name, value in whole.fisher.items():
        assert torch.equal(value, parts.fisher[name])
    index = json.loads(hub.read(NAME, "anchor.safetensors.index.json"))
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.element_size() for n in names for t in loaded(hub, n, tmp_path).values()
    )
    assert ewc.push(anchor, NAME, max_shard_size=size).changed == []
    done = ewc.push(anchor, NAME)
    assert done.changed == ["README.md", "anchor.safetensors"]
    assert done.removed == sorted(["anchor.safetensors.index.json", *names])
    assert sorted(hub.files(NAME)) == [".gitattributes", "README.md", "anchor-importance.png", "anchor.safetensors"]


def loaded(hub, name, tmp_path):
    (tmp_path / "part").write_bytes(hub.read(NAME, name))
    return load_file(tmp_path / "part")


def parts_of(hub, anchor, folder):
    """Put the anchor in parts, and lay them into a folder."""
    ewc.push(anchor, NAME, max_shard_size=700)
    folder.mkdir()
    for name in hub.files(NAME):
        (folder / name).write_bytes(hub.read(NAME, name))
    return folder / "anchor.safetensors.index.json"


def test_parts_on_this_machine(hub, anchor, tmp_path, ewc_ft, monkeypatch):
    index = parts_of(hub, anchor, tmp_path / "parts")
    whole = ewc.Anchor.open(anchor)
    assert ewc.Anchor.open(index).digest == whole.digest
    assert "old" in ewc_ft("inspect", index).stderr
    ewc.push(index, "someone/again")
    assert hub.read("someone/again", "anchor.safetensors") == anchor.read_bytes()
    with pytest.raises(AnchorError, match=r"is one part of an anchor. Name the index beside it"):
        ewc.Anchor.open(next(index.parent.glob("anchor-0*")))
    assert "is one part of an anchor" in ewc_ft("inspect", next(index.parent.glob("anchor-0*")), expect=1).output
    # A cache of the Hub's client has links, index and parts alike.
    (tmp_path / "links").mkdir()
    for path in index.parent.iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    assert ewc.Anchor.open(tmp_path / "links" / index.name).digest == whole.digest


BAD_NAMES = [
    "../anchor.safetensors",
    "/etc/passwd",
    "..\\x.safetensors",
    "a/b.safetensors",
    "x.pt",
    "",
    ".safetensors/",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_an_index_that_names_files_elsewhere(hub, anchor, tmp_path, name):
    index = parts_of(hub, anchor, tmp_path / "parts")
    document = json.loads(index.read_text())
    document["weight_map"] = dict.fromkeys(document["weight_map"], name)
    index.write_text(json.dumps(document))
    with pytest.raises(AnchorError, match=r"was made to do harm: it names .* which is no file beside it"):
        ewc.Anchor.open(index)
    hub.put(NAME, {index.name: index.read_bytes()})
    hub.clear()
    for use in (ewc.Anchor.open, ewc.inspect):
        with pytest.raises(AnchorError, match="was made to do harm"):
            use(f"hf://{NAME}")
    assert not hub.asked("passwd")


def test_a_part_that_is_a_link_elsewhere(hub, anchor, tmp_path):
    index = parts_of(hub, anchor, tmp_path / "parts")
    part = next(index.parent.glob("anchor-0*"))
    part.rename(tmp_path / "elsewhere.safetensors")
    part.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(AnchorError, match="which is a link to another folder"):
        ewc.Anchor.open(index)
    part.unlink()
    with pytest.raises(AnchorError, match=r"names anchor-0000\d-of-0000\d.safetensors, which is not beside it"):
        ewc.Anchor.open(index)


@pytest.mark.parametrize(
    "document",
    [
        "",
        "[]",
        "{",
        '{"metadata": {}, "weight_map": {}}',
        '{"metadata": [], "weight_map": {"a": "b.safetensors"}}',
        '{"metadata": {"format": "ewc-anchor"}, "weight_map": {"a": 1}}',
        "[" * 100_000,
    ],
)
def test_damaged_indices(tmp_path, document):
    (tmp_path / "a.safetensors.index.json").write_text(document)
    with pytest.raises(AnchorError, match=r"index|weight_map"):
        ewc.Anchor.open(tmp_path / "a.safetensors.index.json")


def test_parts_that_do_not_fit_their_index(hub, anchor, tmp_path):
    index = parts_of(hub, anchor, tmp_path / "parts")
    text = index.read_text()
    document = json.loads(text)
    first = next(iter(document["weight_map"]))
    del document["weight_map"][first]
    index.write_text(json.dumps(document))
    with pytest.raises(AnchorError, match=rf"{first} is in .*, where the index has none"):
        ewc.Anchor.open(index)
    document = json.loads(text)
    document["weight_map"]["fisher.more"] = document["weight_map"][first]
    index.write_text(json.dumps(document))
    with pytest.raises(AnchorError, match=r"fisher.more is not in .*, which should have it"):
        ewc.Anchor.open(index)


def test_what_another_tool_wrote_is_cut_only_if_it_leads_back(hub, anchor, tmp_path):
    with safe_open(anchor, framework="pt") as file:
        metadata = file.metadata()
    save_changed(load_file(anchor), tmp_path / "theirs.safetensors", {**metadata, "format": "ewc-anchor"})
    raw = (tmp_path / "theirs.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    spaced = json.dumps(json.loads(raw[8 : 8 + length])).encode()
    (tmp_path / "theirs.safetensors").write_bytes(len(spaced).to_bytes(8, "little") + spaced + raw[8 + length :])
    ewc.push(tmp_path / "theirs.safetensors", NAME)
    with pytest.raises(AnchorError, match="was written by another tool"):
        ewc.push(tmp_path / "theirs.safetensors", NAME, max_shard_size=100)


# Wherever a path is taken.


def test_every_command_takes_an_address(hub, pushed, anchor, samples, ewc_ft, tmp_path):
    for name in ("old.npz", "new.npz"):
        np.savez(tmp_path / name, x=samples.tensors[0].numpy(), y=samples.tensors[1].numpy())
    data = "npz:new.npz"
    sys.path.insert(0, str(TESTS))
    try:
        place = f"hf://{NAME}"
        arch = ("--arch", "support.models:Small")
        options = ("--data", data, *arch, "--epochs", 1, "--eval", data)
        done = json.loads(ewc_ft("finetune", "--anchors", place, *options, "--json").stdout)
        assert done["checkpoint"] == "old-npz-new-npz.pt"
        local = json.loads(ewc_ft("finetune", "--anchors", anchor, *options, "-o", "local.pt", "--json").stdout)
        assert done["after"] == local["after"]
        one, two = (torch.load(tmp_path / name, weights_only=True) for name in (done["checkpoint"], "local.pt"))
        state = [value for value in one.items() if isinstance(value[1], torch.Tensor)]
        assert state
        assert all(torch.equal(value, two[name]) for name, value in state)
        assert "accuracy" in ewc_ft("evaluate", place, "--data", data, *arch).stderr
        assert "accuracy" in ewc_ft("evaluate", "local.pt", "--data", data, "--head", place, *arch).stderr
        ewc_ft("merge", place, anchor, "-o", "both.safetensors")
        parents = ewc.Anchor.open(tmp_path / "both.safetensors").provenance.merged["parents"]
        assert [parent.get("hub") for parent in parents] == [str(pushed), None]
        ewc_ft(
            "sweep",
            "--anchors",
            place,
            *options[:6],
            "--eval",
            "npz:old.npz",
            "--eval",
            data,
            "--lambda",
            "1,10",
            "-o",
            "swept",
        )
        assert sorted(path.name for path in (tmp_path / "swept").glob("*.pt")) == [
            "old-lambda-1.pt",
            "old-lambda-10.pt",
            "plain.pt",
        ]
        hub.create("someone/model")
        hub.put("someone/model", {"weights/m.pt": (tmp_path / "local.pt").read_bytes()})
        assert "accuracy" in ewc_ft("evaluate", "hf://someone/model/weights/m.pt", "--data", data, *arch).stderr
        made = ewc.consolidate("hf://someone/model/weights/m.pt", data, architecture="support.models:Small")
        assert (
            made.provenance.checkpoint["file"]
            == f"hf://someone/model@{hub.commits('someone/model')[0].oid}/weights/m.pt"
        )
        assert "state_dict" in ewc_ft("inspect", "hf://someone/model/weights/m.pt", *arch).stderr
    finally:
        sys.path.remove(str(TESTS))


def test_a_run_can_be_repeated_when_the_branch_has_moved(hub, pushed, small, samples, tmp_path):
    def run(anchors, output, **options):
        return ewc.finetune(
            trained(Small()),
            samples,
            anchors=anchors,
            output=tmp_path / output,
            epochs=2,
            eval_on=[],
            batch_size=5,
            **options,
        )

    lineage = run(f"hf://{NAME}", "a.pt").lineage
    document = json.loads((tmp_path / "a.run" / "run.json").read_text())
    assert document["options"]["anchors"] == [str(pushed)]
    (known,) = document["found"]["anchors"]
    assert (known["hub"], known["file"]) == (str(pushed), str(pushed))
    assert known["sha256"] == ewc.Anchor.open(str(pushed)).digest
    assert lineage == [{"name": "old", "sha256": known["sha256"], "lambda": 100.0, "hub": str(pushed)}]
    ewc.push(ewc.consolidate(small, samples, name="other", estimator="empirical"), NAME)
    run(document["options"]["anchors"], "b.pt")
    run(f"hf://{NAME}", "c.pt")
    a, b, c = ((tmp_path / name).read_bytes() for name in ("a.pt", "b.pt", "c.pt"))
    assert a == b
    assert a != c
    with pytest.raises(UsageError, match=rf"cannot go on with other options: anchors was .*{pushed.revision}"):
        run(f"hf://{NAME}", "a.pt", resume=tmp_path / "a.run")


def test_offline(hub, pushed, samples, tmp_path, offline, monkeypatch):
    def run(output, place=f"hf://{NAME}"):
        ewc.finetune(trained(Small()), samples, anchors=place, output=tmp_path / output, epochs=1, eval_on=[])
        return (tmp_path / output).read_bytes()

    first = run("a.pt")
    offline()
    hub.clear()
    assert run("b.pt") == first
    assert run("c.pt", str(pushed)) == first
    assert ewc.inspect(f"hf://{NAME}").provenance.name == "old"
    assert ewc.pull(NAME, output=tmp_path / "p.safetensors").place == pushed
    assert hub.requests == []
    with pytest.raises(
        UnreachableError,
        match="hf://someone/none is not in the cache, and HF_HUB_OFFLINE is set.*Or name a file or folder of this",
    ):
        ewc.Anchor.open("hf://someone/none")
    with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE is set"):
        ewc.push(tmp_path / "p.safetensors", NAME)


def test_a_commit_that_is_in_the_cache_is_not_asked_for(hub, pushed):
    ewc.Anchor.open(str(pushed))
    hub.clear()
    ewc.Anchor.open(str(pushed))
    assert hub.requests == []
    ewc.Anchor.open(f"hf://{NAME}")
    assert not [request for request in hub.requests if request.method == "GET" and "/api/" not in request.path]


def test_without_a_connection_the_cache_will_do(hub, pushed, tmp_path):
    ewc.Anchor.open(f"hf://{NAME}")
    hub.stop()
    found = ewc.Anchor.open(f"hf://{NAME}")
    assert f"taken from the cache (commit {pushed.revision[:12]})" in found.remarks[0]
    with pytest.raises(
        UnreachableError, match=r"hf://someone/none is not in the cache, and the Hub at http://127.0.0.1"
    ):
        ewc.Anchor.open("hf://someone/none")


def big_anchor(tmp_path, numbers=200_000):
    """An anchor that is larger than what is read of it first."""
    model = torch.nn.Sequential(torch.nn.Linear(numbers // 10, 10))
    data = torch.utils.data.TensorDataset(torch.randn(4, numbers // 10), torch.arange(4))
    return ewc.consolidate(model, data, name="big", curvature="identity", output=tmp_path / "big.safetensors").path


@pytest.mark.parametrize("limit", ["5GB", "500KB"])
def test_inspect_fetches_no_more_than_the_header(hub, tmp_path, limit):
    path = big_anchor(tmp_path)
    ewc.push(path, NAME, max_shard_size=limit)
    hub.clear()
    found = ewc.inspect(f"hf://{NAME}")
    parts = len([name for name in hub.files(NAME) if name.startswith("anchor-0")]) or 1
    assert found.provenance == ewc.inspect(path).provenance
    assert found.tensors == ewc.inspect(path).tensors
    assert sum(request.sent for request in hub.requests) < parts * (1 << 17) + 30_000
    assert not list(cache().rglob("anchor*.safetensors"))
    assert str(found.file) == f"hf://{NAME}@{hub.commits(NAME)[0].oid}/{found.file.file}"
    # What is in the cache anyway is read there.
    ewc.Anchor.open(f"hf://{NAME}")
    hub.clear()
    ewc.inspect(f"hf://{NAME}")
    assert not [request for request in hub.requests if "/cdn/" in request.path]


def test_inspect_reads_what_it_needs(hub, small, samples, tmp_path):
    """Eigenvalues of K-FAC blocks; and the curvature where the header has no importance."""
    from dataclasses import replace

    data = torch.utils.data.TensorDataset(samples.tensors[0].float(), samples.tensors[1])
    made = ewc.consolidate(small.float(), data, curvature="kfac", kfac_rank=2)
    bare = replace(made, provenance=replace(made.provenance, importance=[])).save(tmp_path / "bare.safetensors")
    for number, anchor in enumerate((made.save(tmp_path / "made.safetensors"), bare)):
        ewc.push(anchor.path, f"someone/k{number}")
        here, there = ewc.inspect(anchor.path), ewc.inspect(f"hf://someone/k{number}")
        assert there.blocks == here.blocks
        assert there.provenance.importance == here.provenance.importance


def test_models_on_the_hub_that_are_no_anchors(hub, tmp_path, ewc_ft, small):
    hub.create("someone/model")
    hub.create("someone/fisher")
    hub.put("someone/model", {"config.json": b"{}", "model.safetensors": b"x"})
    sentence = "there is no anchor in hf://someone/model@.*It is a plain model; with its data, `ewc-ft consolidate hf:"
    with pytest.raises(HubError, match=sentence):
        ewc.Anchor.open("hf://someone/model")
    with pytest.raises(HubError, match="there is no anchor in hf://someone/model@"):
        ewc.pull("someone/model", output=tmp_path / "x")
    hub.put("someone/fisher", {"fisher.safetensors": b"x", "fisher.pt": b"y"})
    with pytest.raises(HubError, match="If one of its files is an anchor, name it: hf://someone/fisher/FILE"):
        ewc.Anchor.open("hf://someone/fisher")
    with pytest.raises(AnchorError, match="cannot be read as an anchor"):
        ewc.Anchor.open("hf://someone/fisher/fisher.safetensors")
    with pytest.raises(AnchorError, match=r"is no anchor, which is a safetensors file"):
        ewc.inspect("hf://someone/fisher/fisher.pt")
    save_file({"a": torch.ones(2)}, tmp_path / "plain.safetensors")
    hub.put("someone/fisher", {"plain.safetensors": tmp_path / "plain.safetensors"})
    with pytest.raises(
        AnchorError, match=r"hf://someone/fisher@\w+/plain.safetensors is a safetensors file but not an"
    ):
        ewc.Anchor.open("hf://someone/fisher/plain.safetensors")
    assert "safetensors" in ewc_ft("inspect", "hf://someone/fisher/plain.safetensors").stderr


@pytest.mark.parametrize("limit", ["5GB", "700B"])
def test_inspect_at_a_commit(hub, anchor, limit, offline):
    """Also where the index alone is in the cache."""
    ewc.push(anchor, NAME, max_shard_size=limit)
    first = ewc.inspect(f"hf://{NAME}")
    again = ewc.inspect(str(first.file))
    assert (again.provenance, again.tensors, again.sha256) == (first.provenance, first.tensors, first.sha256)
    assert first.sha256 == (ewc.Anchor.open(anchor).digest if limit == "5GB" else None)
    offline()
    with pytest.raises(UnreachableError):
        ewc.inspect(str(first.file))


def test_looking_does_not_take_away_what_is_in_the_cache(hub, pushed, small, samples, offline):
    ewc.Anchor.open(f"hf://{NAME}")
    ewc.push(ewc.consolidate(small, samples, name="new", estimator="empirical"), NAME)
    assert ewc.inspect(f"hf://{NAME}").provenance.name == "new"
    hub.fail("GET /cdn/", status=404, times=None)
    with pytest.raises(HubError):
        ewc.Anchor.open(f"hf://{NAME}")
    offline()
    assert ewc.Anchor.open(f"hf://{NAME}").place == pushed


@pytest.mark.parametrize("abruptly", [False, True])
def test_inspect_goes_on_where_it_was_cut_off(hub, tmp_path, abruptly):
    path = big_anchor(tmp_path)
    ewc.push(path, NAME)
    hub.clear()
    hub.cut("GET /cdn/", after=70_000, times=2, abruptly=abruptly)
    assert ewc.inspect(f"hf://{NAME}").tensors == ewc.inspect(path).tensors


def test_a_hub_that_lies_about_parts(hub, pushed):
    hub.fail("GET /cdn/", status=200, body=b"x" * 5000, times=None)
    with pytest.raises(HubError, match="the Hub sends no parts of files"):
        ewc.inspect(f"hf://{NAME}")
    hub.clear()
    hub.fail("GET /cdn/", status=206, body=b"x" * 500_000, times=None)
    with pytest.raises(HubError, match="the Hub sent more than was asked for"):
        ewc.inspect(f"hf://{NAME}")


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F" + "9" * 5000, "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": None, "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": []},
        {"__metadata__": {"format": 1}},
        [],
    ],
)
def test_headers_that_cannot_be(hub, tmp_path, header):
    text = json.dumps(header).encode()
    path = tmp_path / "anchor.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    hub.create(NAME)
    hub.put(NAME, {path.name: path})
    for use in (ewc.inspect, ewc.Anchor.open):
        for place in (path, f"hf://{NAME}"):
            with pytest.raises(AnchorError, match="cannot be read as an anchor"):
                use(place)


def test_several_anchors_in_one_repository(hub, anchor):
    hub.create(NAME)
    hub.put(NAME, {"a.anchor.safetensors": anchor, "deep/b.anchor.safetensors": anchor})
    with pytest.raises(HubError, match=r"has several anchors \(a.anchor.safetensors, deep/b.anchor.safetensors\)"):
        ewc.Anchor.open(f"hf://{NAME}")
    assert ewc.Anchor.open(f"hf://{NAME}/deep").place.file == "deep/b.anchor.safetensors"
    assert ewc.Anchor.open(f"hf://{NAME}/a.anchor.safetensors").place.file == "a.anchor.safetensors"
    hub.put(NAME, {"anchor.safetensors": anchor})
    assert ewc.Anchor.open(f"hf://{NAME}").place.file == "anchor.safetensors"
    with pytest.raises(HubError, match=r"/c.safetensors is not there: the repository has .gitattributes, a.anchor"):
        ewc.Anchor.open(f"hf://{NAME}/c.safetensors")


# What goes wrong.


def test_refusals_are_one_sentence(hub, pushed, anchor, monkeypatch, tmp_path):
    hub.create("someone/secret", private=True)
    hub.create("someone/gated", gated=True)
    hub.put("someone/gated", {"anchor.safetensors": anchor})
    hub.add_user("stranger", "hf_strangerToken0123456789abcdefghij")
    hub.add_user("reader", "hf_readerToken0123456789abcdefghijkl", read_only=True)

    def refused(call, kind=HubError):
        fresh_cache()
        with pytest.raises(kind) as caught:
            call()
        assert "hf_" not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is None
        return str(caught.value)

    def log_in(token):
        monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")

    assert "there is no repository someone/none on the Hub that your token may read" in refused(
        lambda: ewc.Anchor.open("hf://someone/none")
    )
    assert "has no revision 'gone' (any more)" in refused(lambda: ewc.Anchor.open(f"hf://{NAME}@gone"))
    assert "has no revision" in refused(lambda: ewc.Anchor.open(f"hf://{NAME}@{'0' * 40}"))
    assert "names no repository on the Hub; expected hf://ORG/NAME" in refused(
        lambda: ewc.Anchor.open("hf://alone"), UsageError
    )
    log_in("hf_strangerToken0123456789abcdefghij")
    assert "that your token may read" in refused(lambda: ewc.Anchor.open("hf://someone/secret"))
    assert "someone/gated is gated. Ask for access at http://127.0.0.1" in refused(
        lambda: ewc.Anchor.open("hf://someone/gated")
    )
    assert "does not allow this for someone/old" in refused(lambda: ewc.push(anchor, NAME, license="mit"))
    log_in("hf_readerToken0123456789abcdefghijkl")
    assert "does not allow this" in refused(lambda: ewc.push(anchor, "reader/new"))
    log_in("hf_unknownToken0123456789abcdefghijk")
    assert "the Hub does not know who you are" in refused(lambda: ewc.Anchor.open(f"hf://{NAME}"))
    log_in(None)
    assert "or it is private. Check the name; for a private one log in: hf auth login" in refused(
        lambda: ewc.Anchor.open("hf://someone/secret")
    )
    assert "hf auth login" in refused(lambda: ewc.push(anchor, NAME, license="mit"))
    assert ewc.Anchor.open(f"hf://{NAME}").digest  # which anybody may read


@pytest.mark.parametrize("after", [0, 1, 7, 8, 1000, 3000, 3587])
def test_a_pull_that_is_cut(hub, pushed, anchor, tmp_path, after):
    """The client takes it up again, or it starts clean the next time."""
    hub.cut("GET /cdn/", after=after)
    assert ewc.pull(NAME, output=tmp_path / "a.safetensors").path.read_bytes() == anchor.read_bytes()
    fresh_cache()
    hub.cut("GET /cdn/", after=after, times=1, abruptly=True)
    assert ewc.pull(NAME, output=tmp_path / "b.safetensors").path.read_bytes() == anchor.read_bytes()
    assert not left_over()


def test_an_anchor_of_which_some_parts_are_there(hub, anchor, offline, monkeypatch):
    """What is whole stays, and the rest is fetched the next time."""
    place = ewc.push(anchor, NAME, max_shard_size=700).place
    hub.fail("GET /cdn/.*anchor-00002", status=404, times=None)
    with pytest.raises(HubError):
        ewc.Anchor.open(str(place))
    hub.clear()
    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(
            UnreachableError, match=r"anchor-00002-of-00002.safetensors is not in the cache, and HF_HUB"
        ):
            ewc.Anchor.open(str(place))
    assert ewc.Anchor.open(str(place)).digest == ewc.Anchor.open(anchor).digest
    assert not hub.asked("GET /cdn/.*00001")


def test_a_pull_that_fails_leaves_nothing(hub, pushed, anchor, tmp_path):
    hub.fail("GET /cdn/", status=404, times=None)
    with pytest.raises(HubError):
        ewc.pull(NAME, output=tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["huggingface", "old.anchor.safetensors"]
    assert not left_over()
    hub.clear()
    assert ewc.pull(NAME, output=tmp_path / "a.safetensors").path.read_bytes() == anchor.read_bytes()


@pytest.mark.parametrize("limit", ["5GB", "1KB"])
def test_a_file_that_is_not_what_was_promised(hub, anchor, tmp_path, limit):
    ewc.push(anchor, NAME, max_shard_size=limit)
    hub.clear()
    hub.corrupt(r"filename=anchor")
    with pytest.raises(HubError, match=r"is not what the Hub promised: its SHA-256 is \w+, and should be \w+"):
        ewc.pull(NAME, output=tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()
    hub.clear()
    assert ewc.pull(NAME, output=tmp_path / "a.safetensors").path.read_bytes() == anchor.read_bytes()
    # What the cache has is checked as well, whoever changed it.
    for blob in (path for path in cache().rglob("blobs/*") if path.stat().st_size > 500):
        blob.chmod(0o600)
        blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    with pytest.raises(HubError, match="is not what the Hub promised"):
        ewc.Anchor.open(f"hf://{NAME}")


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 429, "headers": {"Retry-After": "0"}, "times": 2},
        {"status": 500, "times": 1},
        {"status": 503, "headers": {"Retry-After": "0"}},
    ],
)
def test_the_hub_is_asked_again(hub, pushed, anchor, fault, small, samples):
    hub.fail(r"GET /api/models/someone/old", **fault)
    assert ewc.Anchor.open(f"hf://{NAME}").place == pushed
    hub.fail(r"POST .*/commit/main", **fault)
    other = ewc.consolidate(small, samples, name="other", estimator="empirical")
    assert ewc.push(other, NAME).changed


def test_the_hub_has_too_much_to_do(hub, pushed, tmp_path):
    hub.fail(r"GET /api/models", status=429, headers={"Retry-After": "900"}, times=None)
    with pytest.raises(UnreachableError, match=r"too many requests \(error 429\).*Try again in 900 seconds"):
        ewc.Anchor.open(f"hf://{NAME}")


def test_a_slow_hub(hub, pushed, monkeypatch):
    monkeypatch.setattr("ewc_finetune.hub.repository.PATIENCE", 0.2)
    hub.delay(r"GET /api/models", 2, times=None)
    with pytest.raises(UnreachableError, match=r"is not in the cache, and the Hub at .* cannot be reached"):
        ewc.Anchor.open("hf://someone/other")


def test_somebody_else_was_faster(hub, pushed, anchor, small, samples):
    """A commit between looking and pushing: the card is put together anew, on what is there then."""
    others = ewc.consolidate(small, samples, name="new", estimator="empirical", architecture="support.models:Small")
    found = threading.Event()

    def meanwhile():
        while not hub.asked("POST .*/preupload"):
            found.wait(0.005)
        hub.put(NAME, {"README.md": b"# Ours\n\nwritten meanwhile\n"})

    hub.delay("POST .*/commit", 0.3)
    thread = threading.Thread(target=meanwhile)
    thread.start()
    ewc.push(others, NAME)
    thread.join()
    card = hub.read(NAME, "README.md").decode()
    assert "written meanwhile" in card
    assert "ewc-finetune:begin" in card
    assert ewc.Anchor.open(f"hf://{NAME}").provenance.name == "new"


def test_an_answer_that_is_lost(hub, anchor):
    """The commit was made, and is not made again."""
    hub.lose("POST .*/commit")
    ewc.push(anchor, NAME)
    assert len(hub.commits(NAME)) == 2


def test_a_push_that_fails_changes_nothing(hub, pushed, small, samples):
    for pattern, status in (
        ("PUT /upload", 403),
        ("POST .*/preupload", 400),
        ("POST .*/commit", 403),
        ("POST .*/commit", 409),
        ("POST .*/commit", 404),
    ):
        other = ewc.consolidate(small, samples, name="other", estimator="empirical", seed=status)
        hub.fail(pattern, status=status, times=None)
        with pytest.raises(HubError):
            ewc.push(other, NAME)
        hub.clear()
    assert hub.commits(NAME)[0].oid == pushed.revision


def test_a_file_that_is_replaced_while_it_is_pushed(hub, anchor, small, samples, monkeypatch):
    other = ewc.consolidate(small, samples, name="other", estimator="empirical")
    monkeypatch.setattr("ewc_finetune.commands.push.make_repository", lambda *_: (hub.create(NAME), other.save(anchor)))
    with pytest.raises(AnchorError, match="has changed since it was opened"):
        ewc.push(anchor, NAME)
    assert len(hub.commits(NAME)) == 1


def test_a_pull_request_to_nothing_and_what_is_said_of_an_empty_repository(hub, anchor, ewc_ft):
    assert "A pull request is to one that is there" in ewc_ft("push", anchor, NAME, "--create-pr", expect=1).output
    hub.fail("POST .*/commit", status=403, times=None)
    assert "someone/old was made, and nothing was pushed to it" in ewc_ft("push", anchor, NAME, expect=1).output


def test_an_anchor_that_was_used_twice_is_in_the_lineage_once(hub, pushed, anchor, samples):
    model = trained(Small())
    done = ewc.finetune(model, samples, anchors=[anchor, f"hf://{NAME}"], epochs=1, eval_on=[])
    assert [entry["sha256"] for entry in done.lineage] == [ewc.Anchor.open(anchor).digest]


def test_a_hub_that_hangs(hub, pushed, monkeypatch):
    monkeypatch.setattr("ewc_finetune.hub.remote.PATIENCE", 0.2)
    hub.delay("GET /cdn/", 2, times=None)
    with pytest.raises(UnreachableError, match="cannot be reached .ReadTimeout"):
        ewc.inspect(f"hf://{NAME}")


def test_what_cannot_be_pushed(hub, tmp_path, anchor, small, samples):
    with pytest.raises(UsageError, match="is no branch to push to"):
        ewc.push(anchor, NAME, revision="a;b")
    with pytest.raises(AnchorError, match="there is no anchor at"):
        ewc.push(tmp_path / "none.safetensors", NAME)
    torch.save(small.state_dict(), tmp_path / "model.pt")
    with pytest.raises(AnchorError, match="is a checkpoint that torch.save wrote, not an anchor"):
        ewc.push(tmp_path / "model.pt", NAME)
    raw = bytearray(anchor.read_bytes())
    raw[-8:] = b"\xff" * 8
    (tmp_path / "nan.safetensors").write_bytes(raw)
    with pytest.raises(ewc.EwcError, match="is not as it was written, by the checksums"):
        ewc.push(tmp_path / "nan.safetensors", NAME)
    for repository in ("old", "someone/old/file", "some one/old", "hf://datasets/someone/old", "../old"):
        with pytest.raises(UsageError):
            ewc.push(anchor, repository)
    with pytest.raises(UsageError, match="the branch goes into --revision"):
        ewc.push(anchor, f"{NAME}@main", revision="main")
    for size in ("0", "-1", "5 apples", "GB", 0):
        with pytest.raises(UsageError, match="the size of a shard is"):
            ewc.push(anchor, NAME, max_shard_size=size)
    assert NAME not in hub.repos
    assert [parse_size(text) for text in ("5GB", "1.5 kb", 7)] == [5_000_000_000, 1500, 7]


def test_a_full_disk(hub, pushed, tmp_path, monkeypatch):
    ewc.Anchor.open(f"hf://{NAME}")

    def full(self, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ewc_finetune.storage.shards.ShardedSource.blocks", full)
    monkeypatch.setattr("ewc_finetune.storage.safetensors_source.FileSource.blocks", full)
    with pytest.raises(StorageError, match="the disk is full. Nothing was left behind"):
        ewc.pull(NAME, output=tmp_path / "a.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["huggingface", "old.anchor.safetensors"]


def test_what_the_client_logs(hub, pushed, ewc_ft):
    """That it tries again; but no signed address, and nothing at all if that is not wanted."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("huggingface_hub").addHandler(handler)
    try:
        hub.cut("GET /cdn/", after=100)
        ewc.Anchor.open(f"hf://{NAME}")
        assert "Trying to resume download" in said.getvalue()
        assert "/cdn/" in said.getvalue()
        assert "Signature" not in said.getvalue()
        before = said.getvalue()
        fresh_cache()
        hub.cut("GET /cdn/", after=100)
        ewc_ft("pull", NAME, "-o", "x.safetensors", "--quiet")
        assert said.getvalue() == before
    finally:
        logging.getLogger("huggingface_hub").removeHandler(handler)


def test_the_token_is_never_shown(hub, anchor, ewc_ft, tmp_path, caplog):
    """Not in what is printed, logged or written, whatever goes wrong."""
    said = []
    ewc_ft("push", anchor, NAME)
    hub.fail("GET /api/models", status=403, body=json.dumps({"error": f"token {TOKEN} is bad"}).encode())
    for arguments, expect in (
        (("pull", NAME, "-o", "y", "--debug"), 1),
        (("push", anchor, NAME, "--verbose"), 0),
        (("pull", f"hf://{TOKEN}@{NAME}"), 2),
        (("pull", f"hf://{NAME}@{TOKEN}", "--debug"), 1),
        (("inspect", f"hf://{NAME}", "--json"), 0),
        (("pull", NAME, "-o", "x.safetensors", "--json", "--verbose"), 0),
    ):
        result = ewc_ft(*arguments, expect=expect)
        said.append(result.output)
    model = Small().double()
    data = torch.utils.data.TensorDataset(torch.randn(6, 4).double(), torch.arange(6) % 3)
    ewc.finetune(model, data, anchors=f"hf://{NAME}", output=tmp_path / "m.pt", epochs=1, eval_on=[])
    ewc.report(tmp_path / "m.run", output=tmp_path / "report.html")
    said += [caplog.text, *(str(request.path) for request in hub.requests)]
    said += [hub.read(NAME, name).decode(errors="replace") for name in hub.files(NAME)]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (tmp_path / "m.run" / "run.json") in written
    said += [path.read_bytes().decode(errors="replace") for path in written]
    assert not [text for text in said if TOKEN in text]


@pytest.mark.slow
def test_the_round_trip_of_the_readme(hub, anchor, tmp_path):
    """Its commands as they stand, but for logging in and the data."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [part for part in text.split("```")[1::2] if "ewc-ft push" in part]
    lines = [line for line in block.strip().splitlines() if not line.startswith("hf ")]
    assert [line.split()[:2] for line in lines[:4]] == [
        ["ewc-ft", "push"], ["ewc-ft", "inspect"], ["ewc-ft", "pull"], ["cmp", "model.anchor.safetensors"]
    ]  # fmt: skip
    anchor.rename(tmp_path / "model.anchor.safetensors")
    np.savez(tmp_path / "fmnist.npz", x=torch.randn(6, 4, dtype=torch.float64).numpy(), y=np.arange(6) % 3)
    script = "\n".join(lines).replace("YOU/", "someone/")
    script = script.replace(
        "--data fmnist", "--arch support.models:Small --data npz:fmnist.npz --epochs 1 --eval npz:fmnist.npz"
    )
    script += "\ncmp first.pt again.pt"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        ["bash", "-euxc", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert hub.repos["someone/mnist-anchor"].private
    assert TOKEN not in done.stderr + done.stdout


# Addresses.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://o/n", ("o/n", None, None)),
        ("o/n", ("o/n", None, None)),
        ("hf://models/o/n", ("o/n", None, None)),
        ("hf://o/n@v1.0/a/b.safetensors", ("o/n", "v1.0", "a/b.safetensors")),
        ("hf://o/n@refs/pr/3/a.safetensors", ("o/n", "refs/pr/3", "a.safetensors")),
        ("hf://o/n@feature%2Fx/a", ("o/n", "feature/x", "a")),
        ("hf://o/n/a@b.safetensors", ("o/n", None, "a@b.safetensors")),
    ],
)
def test_addresses(text, expected):
    found = parse_address(text)
    assert (found.repository, found.revision, found.file) == expected
    assert parse_address(str(found)) == found


@pytest.mark.parametrize(
    "text",
    ["hf://", "hf://o", "hf://o/", "hf:///n", "hf://o/n@", "hf://o/n@/f", "hf://o/n/../x", "hf://o/n//x", "hf://o/n/./x",
     "hf://datasets/o/n", "hf://o n/x", "hf://o/n/a\\b", "hf://o/..", "hf://o/n@a b", "hf://o/n\n", "hf://-o/n"],
)  # fmt: skip
def test_what_is_no_address(text):
    with pytest.raises(UsageError):
        parse_address(text)


words = st.from_regex(r"[A-Za-z0-9_]{1,6}(?:[.-][A-Za-z0-9_]{1,6}){0,2}", fullmatch=True)


@given(words, words, st.none() | st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,12}[a-z]", fullmatch=True),
       st.none() | st.lists(words, min_size=1, max_size=3).map("/".join))  # fmt: skip
def test_addresses_read_back(org, name, revision, file):
    address = HubAddress(f"{org}/{name}", revision, file)
    if org not in ("datasets", "spaces", "buckets", "kernels", "models"):
        assert parse_address(str(address)) == address
        assert is_address(str(address))


def test_what_looks_like_a_token():
    assert redacted(f"x {TOKEN} y") == "x hf_*** y"
    assert redacted("hf://o/hf_models") == "hf://o/hf_models"


MEMORY = """
import re, sys
from pathlib import Path
import ewc_finetune as ewc

def peak():  # which getrusage would give of whoever started this process, if that had more
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

ewc.push(sys.argv[1], "someone/small")
ewc.pull("someone/small", output=sys.argv[4] + "-small")
before = peak()
ewc.push(sys.argv[2], "someone/big", max_shard_size=sys.argv[3])
pushed = peak()
ewc.pull("someone/big", output=sys.argv[4])
print(pushed - before, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux says what a process took at most")
@pytest.mark.parametrize("limit", ["5GB", "100MB"])
def test_memory_does_not_grow_with_the_anchor(hub, tmp_path, limit, anchor):
    """A tensor at a time is read to check it; 16 tensors of 16 MB each here, twice."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2000, 2000) for _ in range(16)))
    data = torch.utils.data.TensorDataset(torch.randn(2, 2000), torch.arange(2))
    path = ewc.consolidate(model, data, curvature="identity", output=tmp_path / "big.safetensors").path
    assert path.stat().st_size > 500_000_000
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(anchor), str(path), limit, str(tmp_path / "back.safetensors")],
        capture_output=True, text=True, check=True, env=dict(os.environ),
    )  # fmt: skip
    pushed, pulled = map(float, done.stdout.split())
    assert max(pushed, pulled) < 200  # MB, of an anchor of 512
    assert (tmp_path / "back.safetensors").read_bytes() == path.read_bytes()
