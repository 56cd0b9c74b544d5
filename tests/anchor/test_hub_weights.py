"""Anchors whose weights are on the Hub: fetched from there, by their digests."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.files import change_anchor
from support.models import Small, trained
from support.transformers_models import bert, reviews, saved

import ewc_finetune as ewc
from ewc_finetune.anchor.hub_weights import Elsewhere, refer
from ewc_finetune.errors import AnchorError, HubError, UsageError
from ewc_finetune.hub.address import HubAddress
from ewc_finetune.hub.client import UnreachableError

BASE = "lab/base"


def put(hub, folder, repository=BASE):
    """Put a folder into a repository; return its commit."""
    if repository not in hub.repos:
        hub.create(repository)
    files = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()}
    return hub.put(repository, files).oid


@pytest.fixture
def plain(hub, tmp_path):
    """A model of plain safetensors on the Hub: where it is, and its weights."""
    state = {name: value.contiguous() for name, value in trained(Small(), torch.float32).state_dict().items()}
    (tmp_path / "base").mkdir()
    save_file(state, tmp_path / "base" / "model.safetensors")
    commit = put(hub, tmp_path / "base")
    return f"hf://{BASE}@{commit}/model.safetensors", state


@pytest.fixture
def data(samples):
    return torch.utils.data.TensorDataset(samples.tensors[0].float(), samples.tensors[1])


def consolidated(place, data, path, **options):
    return ewc.consolidate(place, data, architecture="support.models:Small", output=path, **options)


def test_half_the_size(plain, data, tmp_path):
    place, _ = plain
    whole = consolidated(place, data, tmp_path / "whole.safetensors")
    made = consolidated(f"hf://{BASE}/model.safetensors", data, tmp_path / "a.safetensors", anchor_weights="reference")
    with safe_open(made.path, framework="pt") as file:
        assert not [name for name in file.keys() if name.startswith("anchor.")]  # noqa: SIM118
        assert file.metadata()["format_version"] == "2"
    record = made.provenance.weights_reference
    assert (record["repository"], f"hf://{BASE}@{record['revision']}/model.safetensors") == (BASE, place)
    read = ewc.Anchor.open(made.path)
    assert dict(read.weights).keys() == dict(whole.weights).keys()
    for name, value in whole.weights.items():
        assert torch.equal(value, read.weights[name])
        assert value.dtype == read.weights[name].dtype
    assert ewc.Anchor.load(made.path).save(tmp_path / "b.safetensors").digest == made.digest
    facts = dict(ewc.inspect(made.path).facts)
    assert facts["elsewhere"].startswith(
        f"6 tensors of weights, in {place.rpartition('/')[0]}: model.safetensors (sha256 "
    )
    assert facts["holds"] == dict(ewc.inspect(whole.path).facts)["holds"]
    assert ewc.inspect(made.path).tensors["anchor"]["bytes"] == 0


def test_it_does_what_the_whole_one_does(plain, data, tmp_path, hub, monkeypatch):
    place, _ = plain
    whole = consolidated(place, data, tmp_path / "whole.safetensors")
    made = consolidated(place, data, tmp_path / "a.safetensors", anchor_weights="reference")

    def run(anchor, output):
        ewc.finetune(
            None,
            data,
            architecture="support.models:Small",
            anchors=anchor,
            output=tmp_path / output,
            epochs=2,
            eval_on=[],
        )
        return load_file(tmp_path / output)

    one, two = run(whole.path, "one.safetensors"), run(made.path, "two.safetensors")
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    both = ewc.merge([made.path, whole.path])
    assert both.provenance.weights_reference is None
    assert torch.equal(both.weights["first.weight"], whole.weights["first.weight"])
    pushed = ewc.push(made.path, "someone/small").place
    assert ewc.pull("someone/small", output=tmp_path / "back.safetensors").digest == made.digest
    assert ewc.Anchor.load(str(pushed)).weights.keys() == whole.weights.keys()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.clear()
    run(str(pushed), "three.safetensors")
    assert not hub.requests


def test_a_branch_that_has_moved(plain, data, tmp_path, hub):
    place, state = plain
    made = consolidated(f"hf://{BASE}/model.safetensors", data, tmp_path / "a.safetensors", anchor_weights="reference")
    save_file({name: value + 1 for name, value in state.items()}, tmp_path / "base" / "model.safetensors")
    assert put(hub, tmp_path / "base") not in place
    shutil.rmtree(tmp_path / "huggingface")
    assert torch.equal(ewc.Anchor.open(made.path).weights["last.bias"], state["last.bias"])


def test_weights_that_were_changed_are_stored(plain, data, tmp_path, hub):
    made = consolidated(plain[0], data, tmp_path / "a.safetensors", anchor_weights="reference")
    whole = ewc.Anchor.load(made.path)
    other = {**whole.weights, "last.bias": whole.weights["last.bias"] + 1}
    replace(whole, weights=other).save(tmp_path / "b.safetensors")
    read = ewc.Anchor.load(tmp_path / "b.safetensors")
    assert all(torch.equal(value, read.weights[name]) for name, value in other.items())
    assert "last.bias" not in read.provenance.weights_reference["tensors"]
    replace(whole, weights={n: t + 1 for n, t in other.items()}).save(tmp_path / "c.safetensors")
    assert ewc.Anchor.open(tmp_path / "c.safetensors").provenance.weights_reference is None
    shutil.rmtree(tmp_path / "huggingface")
    hub.stop()
    alone = whole.save(tmp_path / "d.safetensors")  # what cannot be compared is stored
    assert torch.equal(ewc.Anchor.load(alone.path).weights["last.bias"], whole.weights["last.bias"])


def test_what_others_refer_to_is_not_fetched_before_it_is_known(plain, data, tmp_path, hub):
    made = consolidated(plain[0], data, tmp_path / "a.safetensors", anchor_weights="reference")
    hub.put(BASE, {"huge.safetensors": b"x" * 2_000_000})
    commit = hub.commits(BASE)[0].oid

    def change(record, tensors):
        record["revision"] = commit
        renamed("huge.safetensors")(record, tensors)

    hub.clear()
    with pytest.raises(AnchorError, match="was made with other weights than those at"):
        dict(ewc.Anchor.open(changed(made, tmp_path / "b.safetensors", change)).weights)
    assert sum(request.sent for request in hub.requests) < 100_000


def test_a_model_without_an_organisation():
    """As the oldest models on the Hub are named."""
    known = {"file": "model.safetensors", "name": "a", "shape": [1], "dtype": "F32"}
    record = {
        "repository": "gpt2",
        "revision": "0" * 40,
        "files": {"model.safetensors": "0" * 64},
        "tensors": {"a": known},
    }
    assert Elsewhere(record, "it")


def test_models_of_transformers(hub, tmp_path, ewc_ft):
    for name, options in (("one", {}), ("parts", {"max_shard_size": "20KB"})):
        folder = saved(bert(), tmp_path / name, **options)
        put(hub, folder, f"lab/{name}")
        source = reviews(tmp_path / "r.jsonl")
        whole = ewc.consolidate(folder, source)
        said = ewc_ft("consolidate", f"hf:lab/{name}", "--data", source, "--anchor-weights", "reference",
                      "-o", f"{name}.safetensors", "--curvature-dtype", "float16").stderr  # fmt: skip
        count = len(whole.weights)
        assert f"{count} of {count} tensors of weights are not in the anchor but in lab/{name} on the Hub" in said
        read = ewc.Anchor.load(tmp_path / f"{name}.safetensors")
        assert all(torch.equal(value, read.weights[key]) for key, value in whole.weights.items())
        assert (len(read.provenance.weights_reference["files"]) > 1) == bool(options)
        card = ewc.push(read.path, f"someone/{name}")
        text = hub.read(f"someone/{name}", "README.md").decode()
        commit = hub.commits(f"lab/{name}")[0].oid
        assert f"base_model: lab/{name}\n" in text
        assert f"[`lab/{name}`](https://huggingface.co/lab/{name}) at revision [`{commit[:12]}`]" in text
        assert "What they are is not in the file: they are fetched from `model" in text
        assert "diagonal in float16, off by" in text
        assert card.place.repository == f"someone/{name}"


def test_what_is_found(hub, tmp_path):
    """By name, else by content, in whatever dtype it is; what is nowhere stays."""
    weights = {
        "same": torch.randn(3, 4),
        "renamed": torch.randn(3, 4),
        "tied": torch.ones(2),
        "tied.too": torch.ones(2),
        "bias.1": torch.zeros(7),
        "bias.2": torch.zeros(7),
        "wider": torch.randn(5).bfloat16().float(),
        "changed": torch.randn(4),
        "number": torch.tensor(3.0),
        "counter": torch.tensor([1, 2]),
    }
    stored = {
        "same": weights["same"],
        "model.renamed": weights["renamed"],
        "tied": weights["tied"],
        "model.bias": torch.zeros(7),
        "wider": weights["wider"].bfloat16(),
        "changed": weights["changed"] + 1e-7,
        "number": weights["number"],
        "counter": weights["counter"],
        "nan": torch.full((3, 4), float("nan")),
    }
    save_file(stored, tmp_path / "m.safetensors")
    hub.create(BASE)
    commit = hub.put(BASE, {"deep/m.safetensors": tmp_path / "m.safetensors"}).oid
    record = refer(weights, HubAddress(BASE, commit), ["deep/m.safetensors"])
    names = {name: known["name"] for name, known in record["tensors"].items()}
    assert names == {"same": "same", "renamed": "model.renamed", "tied": "tied", "tied.too": "tied", "wider": "wider",
                     "number": "number", "bias.1": "model.bias", "bias.2": "model.bias"}  # fmt: skip
    assert record["tensors"]["wider"]["dtype"] == "F32"
    with pytest.raises(AnchorError, match="none of the weights is in hf://lab/base@"):
        refer({"changed": weights["changed"]}, HubAddress(BASE, commit), ["deep/m.safetensors"])


def test_what_cannot_refer(plain, data, small, tmp_path, hub):
    with pytest.raises(UsageError, match="Small does not come from the Hub"):
        ewc.consolidate(small, data, anchor_weights="reference")
    torch.save(small.float().state_dict(), tmp_path / "m.pt")
    with pytest.raises(UsageError, match="does not come from the Hub"):
        consolidated(tmp_path / "m.pt", data, None, anchor_weights="reference")
    hub.put(BASE, {"m.pt": tmp_path / "m.pt"})
    with pytest.raises(UsageError, match="has its weights in m.pt; an anchor can refer to safetensors files alone"):
        consolidated(f"hf://{BASE}/m.pt", data, None, anchor_weights="reference")
    with pytest.raises(UsageError, match="anchor weights"):
        consolidated(f"hf://{BASE}/m.pt", data, None, anchor_weights="none")


def changed(anchor, path, change):
    """Rewrite an anchor's record of its weights."""
    return change_anchor(anchor.path, lambda record, tensors: change(record["weights_reference"], tensors), path)


def moved(**values):
    return lambda record, tensors: record.update(values)


def renamed(name):
    def change(record, tensors):
        record["files"] = {name: "0" * 64}
        for known in record["tensors"].values():
            known["file"] = name

    return change


def of_first(**values):
    return lambda record, tensors: record["tensors"]["first.weight"].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed("../../etc/passwd"), "names no file|which is no file at a commit"),
        (renamed("/etc/passwd"), "names no file|which is no file at a commit"),
        (moved(repository="../x"), "names no repository|which is no file at a commit"),
        (moved(repository="lab/base@main"), "names no repository|which is no file at a commit"),
        (moved(revision="main"), "which is no file at a commit"),
        (moved(revision="../" * 3), "which is no file at a commit|no revision"),
        (moved(files=[]), "weights_reference is"),
        (of_first(dtype="I8"), "has the type 'I8'"),
        (of_first(shape=[6, 5]), "fisher.first.weight has shape"),
        (of_first(shape="x"), "weights_reference is"),
        (lambda record, tensors: tensors.update({"anchor.last.bias": torch.ones(3)}), "is in the file, and in another"),
    ],
)
def test_records_that_cannot_be(plain, data, tmp_path, hub, change, message):
    made = consolidated(plain[0], data, tmp_path / "a.safetensors", anchor_weights="reference")
    hub.clear()
    with pytest.raises((AnchorError, UsageError), match=message):
        ewc.Anchor.open(changed(made, tmp_path / "bad.safetensors", change))
    assert not hub.requests


def test_weights_that_are_others(plain, data, tmp_path, hub):
    made = consolidated(plain[0], data, tmp_path / "a.safetensors", anchor_weights="reference")

    def weights(path):
        return dict(ewc.Anchor.open(path).weights)

    other = changed(
        made,
        tmp_path / "b.safetensors",
        lambda record, _: record["files"].update(dict.fromkeys(record["files"], "0" * 64)),
    )
    with pytest.raises(AnchorError, match=r"was made with other weights than those at hf://lab/base@.*should be 0000"):
        weights(other)
    with pytest.raises(AnchorError, match="first.nothing is not in hf://lab/base@.* as it should be"):
        weights(changed(made, tmp_path / "c.safetensors", of_first(name="first.nothing")))
    gone = "0" * 40
    with pytest.raises(HubError, match="has no revision '0000"):
        weights(changed(made, tmp_path / "d.safetensors", moved(revision=gone)))
    shutil.rmtree(tmp_path / "huggingface")
    hub.repos[BASE].private = True
    hub.tokens.clear()
    with pytest.raises(HubError):
        weights(made.path)
    hub.stop()
    with pytest.raises(UnreachableError, match=r"hf://lab/base@\w+/model.safetensors is not in the cache"):
        weights(made.path)
