import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.files import metadata_of, record_of, save_changed

from ewc_finetune import Provenance
from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.errors import AnchorError, EwcError, NonFiniteError, StorageError


def make(**changes):
    anchor = Anchor(
        weights={"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2, dtype=torch.bfloat16)},
        fisher={"a.weight": torch.full((2, 3), 0.5)},
        buffers={"norm.running_mean": torch.zeros(2), "norm.num_batches_tracked": torch.tensor(7)},
        provenance=Provenance(name="old", samples=10, classes=["cat", "dög \u2028"], data={"spec": "mnist"}),
    )
    return dataclasses.replace(anchor, **changes)


def rewrite(path, tensors=None, **metadata):
    """Change an anchor file behind the package's back."""
    save_changed(tensors or load_file(path), path, {**metadata_of(path), **metadata})


def test_round_trip(tmp_path):
    saved = make().save(tmp_path / "a.safetensors")
    loaded = Anchor.load(tmp_path / "a.safetensors")
    assert loaded.provenance == make().provenance
    for group in ("weights", "fisher", "buffers"):
        for name, tensor in getattr(make(), group).items():
            found = getattr(loaded, group)[name]
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
    assert (loaded.path, loaded.digest) == (saved.path, saved.digest)
    assert len(loaded.digest) == 64
    assert loaded.remarks == ()


def test_the_file_is_format_version_1(tmp_path):
    make().save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata()["format"] == "ewc-anchor"
        assert file.metadata()["format_version"] == "1"
        assert sorted(file.keys()) == [
            "anchor.a.bias",
            "anchor.a.weight",
            "buffer.norm.num_batches_tracked",
            "buffer.norm.running_mean",
            "fisher.a.weight",
        ]
        assert file.get_tensor("fisher.a.weight").dtype == torch.float32


def test_the_file_has_ordinary_permissions(tmp_path):
    make().save(tmp_path / "a.safetensors")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_same_anchor_gives_the_same_bytes(tmp_path):
    contents = set()
    for i in range(8):
        make().save(tmp_path / f"{i}.safetensors")
        contents.add((tmp_path / f"{i}.safetensors").read_bytes())
    assert len(contents) == 1


@settings(max_examples=30, deadline=None)
@given(name=st.text(max_size=30), classes=st.lists(st.text(max_size=8), max_size=3), spec=st.text(max_size=20))
def test_any_text_survives(tmp_path_factory, name, classes, spec):
    path = tmp_path_factory.mktemp("anchor") / "a.safetensors"
    provenance = Provenance(name=name, classes=classes, data={"spec": spec})
    make(provenance=provenance).save(path)
    assert Anchor.load(path).provenance == provenance


def test_a_header_whose_length_looks_like_a_pickle(tmp_path):
    length = 0x010480
    start = make(provenance=Provenance(name="")).save(tmp_path / "a.safetensors").path.read_bytes()[:8]
    name = "x" * (length - int.from_bytes(start, "little"))
    path = make(provenance=Provenance(name=name)).save(tmp_path / "b.safetensors").path
    assert path.read_bytes()[:2] == b"\x80\x04"
    assert Anchor.load(path).provenance.name == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fisher": {"a.weight": torch.full((2, 3), -1.0)}}, r"fisher\.a\.weight holds negative"),
        ({"fisher": {"a.weight": torch.ones(3, 2)}}, r"shape \(3, 2\) and anchor\.a\.weight has shape \(2, 3\)"),
        ({"fisher": {"b": torch.ones(1)}}, r"fisher\.b has no anchor\.b"),
        ({"fisher": {"a.weight": torch.zeros(2, 3)}}, "zero everywhere"),
        ({"fisher": {}}, "zero everywhere"),
        ({"fisher": {"a.weight": torch.full((2, 3), float("nan"))}}, r"fisher\.a\.weight holds NaN"),
        (
            {"weights": {"a.weight": torch.full((2, 3), float("inf"))}},
            r"anchor\.a\.weight holds NaN or infinity \(6 of 6",
        ),
        ({"buffers": {"m": torch.tensor([float("nan")])}}, r"buffer\.m holds NaN"),
    ],
)
def test_a_useless_anchor_is_never_written(tmp_path, changes, message):
    with pytest.raises((AnchorError, NonFiniteError), match=message):
        make(**changes).save(tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_useless_file_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    make().save(path)
    rewrite(path, {**load_file(path), "fisher.a.weight": torch.full((2, 3), -1.0)})
    with pytest.raises(AnchorError, match=r"a\.safetensors: fisher\.a\.weight holds negative"):
        Anchor.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; expected an anchor"),
        (b"\x80\x02}q\x00.", "a checkpoint that torch.save wrote, not an anchor"),
        (b"\xff" * 8 + b"{}", "not a whole safetensors file"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{}", "not an anchor"),
    ],
)
def test_files_that_are_no_anchor(tmp_path, content, message):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(AnchorError, match=message):
        Anchor.load(path)


def test_a_cut_file_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    make().save(path)
    whole = path.read_bytes()
    for length in (1, 7, 8, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(AnchorError, match="safetensors"):
            Anchor.load(path)


def test_a_missing_file_and_a_plain_model(tmp_path):
    with pytest.raises(AnchorError, match="there is no anchor at"):
        Anchor.load(tmp_path / "none.safetensors")
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(AnchorError, match=r"not an anchor .* makes the anchor of a model's weights"):
        Anchor.load(tmp_path / "model.safetensors")


def test_a_newer_version_is_refused_by_name(tmp_path):
    path = tmp_path / "a.safetensors"
    make().save(path)
    rewrite(path, format_version="3")
    with pytest.raises(AnchorError, match=r"format version 3; this ewc-finetune reads up to 2\. Upgrade"):
        Anchor.load(path)


def test_unknown_keys_are_ignored_with_a_remark(tmp_path):
    path = tmp_path / "a.safetensors"
    make().save(path)
    rewrite(path, {**load_file(path), "mood.x": torch.ones(1)}, anchor=json.dumps({**record_of(path), "colour": "red"}))
    (remark,) = Anchor.load(path).remarks
    assert "colour, mood.x" in remark


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("samples", "many", "samples is 'many'; expected a number"),
        ("lineage", {}, "lineage is {}"),
        ("name", None, "with a name"),
        ("lineage", [1], "lineage is .1.; expected a list of objects"),
        ("samples", -5, "samples is -5"),
        ("estimator", "magic", "estimator is 'magic'; expected one of exact"),
        ("checkpoint", {"architecture": 5}, "checkpoint is"),
        ("input", {"shape": 7}, "input is"),
        ("classes", [{}], "classes is"),
        ("half", False, "lambda/2"),
        ("curvature", "ekfac", "curvature is 'ekfac'"),
        ("normalisation", {"layers": 5}, "normalisation is"),
        ("merged", {"parents": [], "through": [[]]}, "merged is"),
        ("samples", 10**400, "samples is"),
        ("seed", 10**400, "seed is"),
        ("scores", {"loss": 10**400}, "scores is"),
        ("weights_reference", "elsewhere", "weights_reference is 'elsewhere'; expected an object with repository"),
        ("weights_reference", [], "weights_reference is"),
    ],
)
def test_a_document_that_contradicts_the_format(tmp_path, key, value, message):
    path = tmp_path / "a.safetensors"
    make().save(path)
    rewrite(path, anchor=json.dumps({**record_of(path), key: value}))
    with pytest.raises(AnchorError, match=message):
        Anchor.load(path)
    for broken in ("{not json", "[" * 100_000):
        rewrite(path, anchor=broken)
        with pytest.raises(AnchorError, match="not a JSON document"):
            Anchor.load(path)


@pytest.mark.parametrize("version", ["0", "-1", "", "one", "9" * 5000])
def test_versions_that_are_none(tmp_path, version):
    path = tmp_path / "a.safetensors"
    make().save(path)
    rewrite(path, format_version=version)
    with pytest.raises(AnchorError, match="format_version is"):
        Anchor.load(path)


def test_a_mask_of_minus_infinity_is_no_error(tmp_path):
    make(buffers={"mask": torch.full((2, 2), -torch.inf).triu(1)}).save(tmp_path / "a.safetensors")
    assert Anchor.load(tmp_path / "a.safetensors").buffers["mask"].isinf().any()
    with pytest.raises(NonFiniteError, match="running_var holds NaN or infinity"):
        make(buffers={"norm.running_var": torch.tensor([torch.inf])}).save(tmp_path / "b.safetensors")


def test_saving_into_nowhere(tmp_path):
    with pytest.raises(StorageError, match="does not exist"):
        make().save(tmp_path / "none" / "a.safetensors")


def test_every_error_has_an_exit_code():
    assert issubclass(AnchorError, EwcError)
    assert EwcError.exit_code == 1
