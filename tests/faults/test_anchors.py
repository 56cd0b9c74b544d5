"""Anchors that somebody has changed are taken or refused in a sentence of ours, and nothing else happens."""

import anchors
import pytest
import torch
from sizes import times
from torch import nn

import ewc_finetune as ewc
from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.errors import AnchorError, EwcError

COUNT = len(times(80, 20_000))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """An anchor of each sort."""
    return anchors.make_anchors(tmp_path_factory.mktemp("anchors"))


def retyped(dtype, size):
    def change(header):
        for name in ("anchor.head.bias", "fisher.head.bias"):
            start, end = header[name]["data_offsets"]
            header[name] |= {"dtype": dtype, "shape": [(end - start) // size]}

    return change


def many_dimensions(header):
    for name in ("anchor.head.bias", "fisher.head.bias"):
        header[name]["shape"] = [1] * 70 + header[name]["shape"]


def deep(header):
    header["__metadata__"]["anchor"]["input"]["deep"] = anchors._deep(500)


def weights_alone(header):
    header["anchor.head.bias"]["dtype"] = "U32"


def parent_without_digest(header):
    del header["__metadata__"]["anchor"]["merged"]["parents"][0]["sha256"]


def distance(header):
    header["__metadata__"]["anchor"]["merged"]["kfac_distance"] = [1, 2]


def surrogate_name(header):
    header["anchor.\ud800"] = header.pop("anchor.head.bias")


def surrogates(header):
    header["__metadata__"]["anchor"] |= {"name": "\ud800", "classes": ["\udcff"], "excluded": {"\ud800": "\udfff"}}


def surrogate_file(header):
    header["__metadata__"]["anchor"]["weights_reference"] = {
        "repository": "\ud800",
        "revision": "\ud800",
        "files": {"\ud800": "0" * 64},
        "tensors": {"x": {"file": "\ud800", "name": "x", "dtype": "F32", "shape": []}},
    }


NAMED = {
    "weights of U32": ("diagonal", weights_alone, "anchor.head.bias is of torch.uint32"),
    "a Fisher of F8": ("diagonal", retyped("F8_E4M3", 1), "float8|has shape"),
    "more than 64 dimensions": ("diagonal", many_dimensions, "head.bias has 71 dimensions; torch has 64 at most"),
    "a parent without sha256": ("merged", parent_without_digest, "expected an object with parents, each with sha256"),
    "a kfac_distance that is a list": ("merged-kfac", distance, "merged is .* expected an object with parents"),
    "values deep within one another": ("diagonal", deep, "values more than 100 deep within one another"),
    "a name that is no text": ("diagonal", surrogate_name, "has no anchor.head.bias beside it"),
    "weights elsewhere, where nothing can be": (
        "diagonal",
        surrogate_file,
        "which is not ORG/NAME|hf://|does not|names",
    ),
}


@pytest.mark.parametrize(("sort", "change", "message"), NAMED.values(), ids=NAMED.keys())
def test_what_was_found_once_is_refused(tmp_path, paths, sort, change, message):
    header, data = anchors.read(paths[sort])
    change(header)
    anchors.write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(EwcError, match=message):
        Anchor.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_surrogates_in_a_provenance_are_kept_and_shown(ewc_ft, tmp_path, paths, form):
    header, data = anchors.read(paths["diagonal"])
    surrogates(header)
    anchors.write(tmp_path / "x.safetensors", header, data)
    shown = ewc_ft("inspect", "x.safetensors", *form)
    assert "name           \\ud800" in shown.stderr
    ewc_ft("merge", "x.safetensors", paths["half"], "--output", "m.safetensors")
    assert Anchor.load("m.safetensors").provenance.merged["parents"][0]["provenance"]["name"] == "\ud800"


def test_complex_weights_are_refused_before_the_pass(small, samples):
    model = nn.Sequential(small)
    model.odd = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(AnchorError, match="the model's odd is of torch.complex64, and a penalty needs real numbers"):
        ewc.consolidate(model, samples)


def test_a_hunt_finds_nothing(tmp_path):
    outcomes, faults = anchors.hunt(COUNT, seed=0, folder=tmp_path)
    assert not faults, faults[0]
    assert {outcome for _, outcome in outcomes} == {"taken", "refused"}
