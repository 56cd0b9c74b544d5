"""The model card: people's text and front matter survive, and nothing that an anchor says can get out of its place."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.models import Small, trained

import ewc_finetune as ewc
from ewc_finetune import Anchor, Provenance
from ewc_finetune.anchor.probe_tensors import Probe
from ewc_finetune.anchor.provenance import read_provenance
from ewc_finetune.checkpoint.checkpoint import FROZEN
from ewc_finetune.commands.inspect import inspect
from ewc_finetune.errors import AnchorError, HubError, UsageError
from ewc_finetune.model_card.card import updated_card
from ewc_finetune.model_card.front_matter import TAGS
from ewc_finetune.model_card.published import Published
from ewc_finetune.model_card.section import BEGIN, END, section
from ewc_finetune.model_card.text import code, without_folders

LAYERS = ("first", "norm", "last")
ORIGIN = Provenance(
    name="old",
    versions={"torch": "2.9.0", "ewc_finetune": "0.1.0"},
    checkpoint={"file": "model.pt", "sha256": "c" * 64, "format": "state_dict", "architecture": "pkg.nets:Small"},
    data={"spec": "npz:/home/me/private.npz?target=y", "split": "train", "size": 1000, "fingerprint": "f" * 64},
    samples=500,
    standard_error={"trace": 0.0123, "layers": {}},
    excluded={"norm.weight": "--exclude norm*", "first.bias": FROZEN, "norm.bias": "--exclude norm*"},
    normalisation={"statistics": "frozen", "layers": ["norm"]},
    scores={"loss": 0.25, "accuracy": 0.9321},
    input={"shape": [1, 28, 28], "flat": True, "bytes_to_unit": True},
    classes=["cat", "dog", "a|b"],
    importance=[
        {"layer": layer, "parameters": 10, "share": share, "mean": 0.1, "max": 0.5}
        for layer, share in zip(LAYERS, (0.2, 0.1, 0.7), strict=True)
    ],
)
PLACE = Published("acme/old-anchor", None, "anchor.safetensors", "d" * 64, license="apache-2.0")


def make(origin=ORIGIN, probes=()):
    model = trained(Small(), torch.float32)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    fisher = {name: torch.ones_like(p) for name, p in weights.items() if name not in origin.excluded}
    buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    return Anchor(weights, fisher, buffers, origin, probes=probes)


def inspected(folder, origin=ORIGIN, **parts):
    return inspect(make(origin, **parts).save(folder / "a.safetensors").path)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return inspected(tmp_path_factory.mktemp("anchor"))


def rows(card):
    """Return the table of facts by name."""
    table = card.partition("| | |\n|---|---|\n")[2].partition("\n\n")[0]
    return dict(re.fullmatch(r"\| (.*?) \| (.*) \|", line).groups() for line in table.splitlines())


def front_matter(card):
    text = card.removeprefix("\ufeff").replace("\r\n", "\n").removeprefix("---\n")
    return yaml.safe_load(text.partition("\n---")[0] + "\n")


def test_a_new_card(found):
    card, remarks = updated_card(None, found, replace(PLACE, base_model="acme/base"))
    assert remarks == []
    assert front_matter(card) == {
        "library_name": "ewc-finetune",
        "base_model": "acme/base",
        "license": "apache-2.0",
        "tags": ["ewc", "fisher-information", "continual-learning"],
    }
    assert "\n---\n\n# old-anchor\n\n" + BEGIN in card
    assert card.endswith(f"{END}\n")
    assert updated_card("", found, replace(PLACE, base_model="acme/base")) == (card, [])


def test_the_hub_reads_the_front_matter(found):
    hub = pytest.importorskip("huggingface_hub")
    card, _ = updated_card("---\r\nlanguage: en\r\n---\r\nmine\r\n", found, PLACE)
    read = hub.ModelCard(card)
    assert (read.data.library_name, read.data.license, read.data.language) == ("ewc-finetune", "apache-2.0", "en")
    assert set(read.data.tags) == set(TAGS)


def test_the_facts_are_those_of_the_anchor(found):
    known = rows(section(found, PLACE))
    assert known["Base model"] == f"`model.pt`, SHA-256 of the weights `{'c' * 64}`"
    assert known["Architecture"] == "`pkg.nets:Small`, checkpoint format `state_dict`"
    assert known["Weights"] == "63, of which 45 are held and the others free"
    assert known["Data"] == "`npz:private.npz?target=y`, `train` split, 1,000 samples"
    assert known["Fingerprint of the samples used"] == f"`{'f' * 64}`"
    assert (
        known["Input"]
        == "1 \N{MULTIPLICATION SIGN} 28 \N{MULTIPLICATION SIGN} 28, bytes, scaled from 0..255 to 0..1, flattened"
    )
    assert known["Classes"] == "3: `cat`, `dog`, `a¦b`"
    assert known["Scores of the model on the data"] == "accuracy 93.21%, loss 0.25"
    assert known["Curvature"] == "diagonal of the Fisher information: a number for each weight"
    assert known["Estimator"] == "exact: the expectation over the labels that the model itself predicts"
    assert known["Samples"] == "N = 500, standard error of the trace 1.2%"
    assert known["Normalisation"] == "`frozen` running statistics of `norm`"
    assert known["Left free"] == f"`norm.bias`, `norm.weight`: `--exclude norm*`<br>`first.bias`: `{FROZEN}`"
    assert known["File"].startswith("`anchor.safetensors`, ")
    assert known["SHA-256"] == f"`{'d' * 64}`"
    assert known["Made with"] == "`ewc_finetune 0.1.0`, `torch 2.9.0`"
    assert known["Licence"] == "`apache-2.0`"


def test_what_is_not_known_is_left_out(tmp_path):
    found = inspected(tmp_path, Provenance(name="old"))
    assert list(rows(section(found, replace(PLACE, license=None)))) == [
        "Weights", "Curvature", "Estimator", "Likelihood", "File", "SHA-256",
    ]  # fmt: skip
    assert "None" not in section(found, replace(PLACE, license=None))


def test_every_fact_of_a_real_consolidation_is_told(tmp_path):
    model, data = trained(Small(), torch.float32), torch.utils.data.TensorDataset(torch.randn(40, 4))
    options = {"curvature": "kfac", "estimator": "sampled", "draws": 3, "seed": 5, "probe": 1}
    ewc.consolidate(model, data, name="old", output=tmp_path / "a.safetensors", **options)
    text = section(inspect(tmp_path / "a.safetensors"), PLACE)
    known = rows(text)
    assert "(K-FAC): 2 layers with 51 weights, and a diagonal for the other 12 weights" in known["Curvature"]
    assert known["Estimator"].endswith("the model's own predictions, 3 for each sample (seed 5)")
    assert known["Probe"].startswith("**1 sample of the data in the file:** `data`, with the model's answers to it (")
    assert "> **This anchor holds 1 sample of the data as it is.**" in text
    assert "--arch PACKAGE.MODULE:CLASS" in text
    assert "(10 unless given" in text
    assert "arXiv:1503.05671" in text
    assert "<D, G D A>" in text


def test_probes_are_warned_of(tmp_path):
    layout = {"shape": [4], "flat": False, "bytes_to_unit": False}
    answers = torch.log_softmax(torch.randn(20, 3), 1).half()
    probe = Probe(torch.randn(20, 4), answers, "npz:/home/me/private.npz", "test", "categorical", layout)
    text = section(inspected(tmp_path, probes=(probe,)), PLACE)
    assert "**This anchor holds 20 samples of the data as they are.** Whoever has the file has them." in text
    assert "**20 samples of the data in the file:** `npz:private.npz`, `test` split" in rows(text)["Probe"]


def test_lineage_and_a_new_head_are_told(tmp_path):
    lineage = [{"name": "older", "sha256": "a" * 64, "lambda": 100.0}]
    head = {"id": "x", "parameters": ["last.weight", "last.bias"]}
    text = section(inspected(tmp_path, replace(ORIGIN, lineage=lineage, head=head)), PLACE)
    assert rows(text)["Trained before under"] == f"`older`, lambda 100, SHA-256 `{'a' * 64}`"
    assert rows(text)["Last layer"].startswith("`last.weight`, `last.bias` took the place")
    assert "> **Its model was already trained under `older`.**" in text
    assert "--lineage latest" in text


def test_parents_of_a_merged_anchor_are_told(tmp_path):
    files = [make(replace(ORIGIN, name=name)).save(tmp_path / f"{name}.safetensors") for name in ("one", "two")]
    ewc.merge(files, lambdas=[1, 2.5], output=tmp_path / "m.safetensors")
    text = section(inspect(tmp_path / "m.safetensors"), PLACE)
    assert rows(text)["Merged from (2)"] == (
        f"`two`, lambda 2.5, `npz:private.npz?target=y`, `train` split, 500 of 1,000 samples, "
        f"SHA-256 `{files[1].digest}`"
    )
    assert "It was merged from 2 anchors." in text
    assert "posterior precision" not in text


def test_a_base_model_on_the_hub_is_linked(found):
    place = replace(PLACE, base_model="acme/base", base_revision="0123456789abcdef")
    url = "https://huggingface.co/acme/base"
    said = rows(section(found, place))["Base model"]
    assert said.startswith(f"[`acme/base`]({url}) at revision [`0123456789ab`]({url}/tree/0123456789abcdef)")
    hostile = replace(PLACE, base_model="x](http://evil.example)", base_revision="y)")
    card, remarks = updated_card(None, found, hostile)
    assert "evil" not in card
    assert "base_model" not in front_matter(card)
    assert len(remarks) == 1


@pytest.mark.parametrize(
    ("checkpoint", "place", "command"),
    [
        ({}, {}, "ewc-ft finetune --anchors hf://acme/old-anchor --data NEW_DATA --output adapted.pt"),
        ({}, {"revision": "v2"}, "--anchors hf://acme/old-anchor@v2 --data"),
        ({"format": "safetensors"}, {}, "--data NEW_DATA --output adapted.safetensors"),
        ({"format": "sharded safetensors"}, {}, "--data NEW_DATA --output adapted.safetensors"),
        ({"architecture": None}, {}, "old-anchor --arch PACKAGE.MODULE:CLASS --data"),
        ({"format": "onnx", "file": "net.onnx"}, {}, "--model net.onnx --data NEW_DATA --output adapted.onnx"),
        ({"format": "onnx", "file": "x; rm -rf ~"}, {}, "old-anchor --model MODEL --data NEW_DATA"),
        ({"format": "onnx", "file": "--trust-code"}, {}, "old-anchor --model MODEL --data NEW_DATA"),
        (
            {"format": "hugging face", "file": "hf:acme/bert"},
            {"base_model": "acme/bert", "base_revision": "abc"},
            "--model hf:acme/bert@abc --data NEW_DATA --output adapted\n",
        ),
        ({"format": "hugging face", "file": "bert"}, {}, "--model bert --data NEW_DATA --output adapted\n"),
        ({"format": "hugging face"}, {}, "pip install 'ewc-finetune[transformers]'\n"),
    ],
)
def test_the_command_can_be_copied(found, checkpoint, place, command):
    origin = replace(ORIGIN, checkpoint={**ORIGIN.checkpoint, **checkpoint})
    assert command in section(replace(found, provenance=origin), replace(PLACE, **place))


@pytest.mark.parametrize(
    ("given_", "shown"),
    [
        ("mnist?permute=1", "mnist?permute=1"),
        ("npz:/home/me/private.npz", "npz:private.npz"),
        ("imagefolder:/data/x/", "imagefolder:x"),
        ("imagefolder:photos/cats?size=64&limit=10", "imagefolder:cats?size=64&limit=10"),
        ("csv:C:\\Users\\me\\t.csv?target=label", "csv:t.csv?target=label"),
        ("hf:org/name?text=review", "hf:org/name?text=review"),
        ("hf:org/name@main", "hf:org/name@main"),
        ("hf:/home/me/reviews", "hf:reviews"),
        ("hf:folder/reviews.jsonl", "hf:reviews.jsonl"),
        ("pkg.data:load?root=/home/me/x&fold=2", "pkg.data:load?root=x&fold=2"),
        ("/home/me/data.npz", "data.npz"),
        ("~/data.npz", "data.npz"),
        ("C:\\Users\\me\\model.pt", "C:model.pt"),
    ],
)
def test_folders_are_nobodys_business(given_, shown):
    assert without_folders(given_) == shown


def test_no_folder_of_the_maker_is_in_a_card(found):
    folder = "/home/secret/place"
    origin = replace(
        ORIGIN,
        name=f"{folder}/name",
        checkpoint={
            "file": f"{folder}/model.pt", "format": "onnx", "architecture": f"pkg:Net?weights={folder}/w.pt",
        },
        data={"spec": f"images:{folder}/photos"},
        lineage=[{"name": f"{folder}/b", "sha256": None}],
    )  # fmt: skip
    parent = {"sha256": None, "lambda": 1.0, "provenance": origin.to_json()}
    origin = replace(origin, merged={"parents": [parent]})
    card, _ = updated_card(None, replace(found, provenance=origin), PLACE)
    assert "secret" not in card
    assert "`images:photos`" in card
    assert str(found.file.parent) not in card


def test_the_figure_and_the_layers(found):
    many = [
        {"layer": f"layer{n}", "parameters": 100, "share": 0.01 * n, "mean": 0.5, "max": float(n)} for n in range(1, 14)
    ]
    found = replace(found, provenance=replace(ORIGIN, importance=[*many, *many[:2]]))
    text = section(found, replace(PLACE, figure="figures/im portance).png"))
    assert "![Bars of each layer's share of the curvature's trace; `layer13` has the most, 13.0%](" in text
    assert "](figures/im%20portance%29.png)" in text
    table = text.partition("| Layer |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [row.split(" | ")[0] for row in table] == [
        *(f"| `layer{n}`" for n in range(2, 14)), "| 3 other layers",
    ]  # fmt: skip
    assert table[-1] == "| 3 other layers | 300 | 4.0% | 0.5 | 2 |"
    assert "![" not in section(found, PLACE)


def test_the_same_anchor_gives_the_same_text(found):
    backwards = replace(
        ORIGIN,
        versions=dict(reversed(ORIGIN.versions.items())),
        scores=dict(reversed(ORIGIN.scores.items())),
        excluded=dict(reversed(ORIGIN.excluded.items())),
    )
    assert section(replace(found, provenance=backwards), PLACE) == section(found, PLACE)


@pytest.mark.parametrize("wrong", [{"repository": "alone"}, {"repository": "a/b/c"}, {"revision": "x y"}])
def test_places_that_the_hub_does_not_have_are_refused(found, wrong):
    with pytest.raises(UsageError, match=r"on the Hub; expected"):
        section(found, replace(PLACE, **wrong))


# Front matter


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "# mine\nlicense:   'mit'  # ours\ntags: [a, \"b\"] # two\nlanguage: en\n",
            "# mine\nlicense:   'mit'  # ours\n"
            'tags: [a, "b", ewc, fisher-information, continual-learning] # two\nlanguage: en\n'
            "library_name: ewc-finetune\n",
        ),
        (
            "tags:\n  - ewc # that is it\n  - 'x'  # last\n# end\nlibrary_name: other\nlicense: apache-2.0\n",
            "tags:\n  - ewc # that is it\n  - 'x'  # last\n  - fisher-information\n  - continual-learning\n# end\n"
            "library_name: other\nlicense: apache-2.0\n",
        ),
        (
            "tags: [\n  a, # first\n  b, # last\n]\nlibrary_name: ewc-finetune\nlicense: apache-2.0\n",
            "tags: [\n  a, # first\n  b, ewc, fisher-information, continual-learning, # last\n]\n"
            "library_name: ewc-finetune\nlicense: apache-2.0\n",
        ),
        (
            "tags: []\nlicense: apache-2.0\n",
            "tags: [ewc, fisher-information, continual-learning]\nlicense: apache-2.0\nlibrary_name: ewc-finetune\n",
        ),
        (
            "tags: # none yet\nlicense: apache-2.0\n",
            "tags: # none yet\n- ewc\n- fisher-information\n- continual-learning\nlicense: apache-2.0\n"
            "library_name: ewc-finetune\n",
        ),
        (
            "  license: apache-2.0\n",
            "  license: apache-2.0\n  library_name: ewc-finetune\n  tags:\n  - ewc\n  - fisher-information\n"
            "  - continual-learning\n",
        ),
        (
            "",
            "library_name: ewc-finetune\nlicense: apache-2.0\ntags:\n- ewc\n- fisher-information\n"
            "- continual-learning\n",
        ),
    ],
)
@pytest.mark.parametrize("eol", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_what_is_missing_is_added_where_it_belongs(found, before, after, eol, bom):
    place = replace(PLACE, license=None) if "mit" in before else PLACE
    card, _ = updated_card(f"{bom}---\n{before}---\nText.\n".replace("\n", eol), found, place)
    assert card.startswith(f"{bom}---\n{after}---\nText.\n\n{BEGIN}\n".replace("\n", eol))
    assert eol == "\n" or "\n" not in card.replace("\r\n", "")


def test_other_opinions_stay_and_are_told(found):
    card = "---\nlibrary_name: transformers\nlicense: mit\nbase_model: [acme/base, x/y]\ntags: [ewc]\n---\n"
    new, remarks = updated_card(card, found, replace(PLACE, base_model="acme/base", license=None))
    assert new.startswith(card.replace("[ewc]", "[ewc, fisher-information, continual-learning]"))
    assert remarks == [
        "the README.md of acme/old-anchor says library_name: transformers, not ewc-finetune; it was left as it is",
    ]
    assert "| Licence | `mit` |" in new


def test_another_licence_than_the_card_has_is_refused(found):
    with pytest.raises(HubError, match=r"says license: mit, not apache-2.0. Change it there, or leave --license out"):
        updated_card("---\nlicense: mit\n---\n", found, PLACE)
    with pytest.raises(UsageError, match="is no licence that the Hub knows"):
        updated_card(None, found, replace(PLACE, license="no licence"))


@pytest.mark.parametrize(
    "front",
    [
        "tags: ewc\n", "x: &t [a]\ntags: *t\n", "{license: mit}\n", "tags: ~\n", "tags:\n- |\n  block\n",
        "x: &t {tags: [a]}\n<<: *t\n", "~\n",
    ],
)  # fmt: skip
def test_front_matter_that_cannot_be_edited_safely_is_left(found, front):
    new, remarks = updated_card(f"---\n{front}---\nText\n", found, replace(PLACE, license=None))
    assert new.startswith(f"---\n{front}")
    assert any("cannot edit safely; add tags: [" in remark for remark in remarks)
    assert (yaml.safe_load(front) or {}).items() <= (front_matter(new) or {}).items()


def test_front_matter_that_holds_itself_is_left(found):
    card, remarks = updated_card("---\nx: &x [*x]\n---\nText\n", found, PLACE)
    assert card.startswith("---\nx: &x [*x]\n---\nText\n")
    assert all("cannot edit safely" in remark for remark in remarks)
    assert len(remarks) == 3


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("---\nlicense: [mit\n---\nText\n", "no valid YAML"),
        ("---\nlicense: \x07\n---\nText\n", "no valid YAML"),
        ("---\ndate: 2024-99-99\n---\nText\n", "no valid YAML"),
        (f"---\nx: {'[' * 1000}\n---\nText\n", "no valid YAML"),
        ("---\n- a\n- b\n---\nText\n", "no list of keys"),
        ("---\njust text\n---\nText\n", "no list of keys"),
        ("---\nlicense: mit\n\n# Title\n", "no other line --- ends it"),
        ("---\ntags: [a]\ntags: [b]\n---\n", "'tags' twice"),
    ],
)
def test_damaged_front_matter_is_an_error(found, card, message):
    with pytest.raises(HubError, match=message):
        updated_card(card, found, PLACE)


# The section's place in people's text


def test_only_our_section_is_replaced(found):
    card, _ = updated_card("# Mine\n\nAbove.", found, PLACE)
    card = card.replace("The anchor `old`", "The anchor of yesterday") + "\nBelow, with no line break"
    new, _ = updated_card(card, found, PLACE)
    assert new == card.replace("The anchor of yesterday", "The anchor `old`")


@pytest.mark.parametrize("marks", [BEGIN, END, END + BEGIN, BEGIN + END + END, BEGIN + BEGIN + END, (BEGIN + END) * 2])
def test_marks_that_are_no_pair_are_an_error(found, marks):
    with pytest.raises(HubError, match=r"expected each once, in this order.*nothing was changed"):
        updated_card(f"Text\n{marks}\nmore\n", found, PLACE)


def test_marks_with_other_spaces_are_marks(found):
    card, _ = updated_card("Text\n\n<!--ewc-finetune:begin-->\nold\n<!--  ewc-finetune:end  -->\nmore", found, PLACE)
    assert card.endswith(f"Text\n\n{section(found, PLACE)}\nmore")


ENDS = st.sampled_from(["\n", "\r\n", "\r", "\n\n", "", " "])
WORDS = st.sampled_from(["# Title", "text", "---", "***", "- item", "```", "<!-- c -->", "", "tags:", "  ", "\u2028"])
BODIES = st.lists(st.tuples(WORDS | st.text(max_size=5), ENDS)).map(lambda parts: "".join(a + b for a, b in parts))
VALUES = st.sampled_from(
    ["mit", "'q'", '"q"', "[a, b]", "[]", "", "# c", "\n- a\n- ewc # c", "\n  - a", "|\n  block\n  text", "{a: 1}", "1"]
)
KEYS = st.lists(st.sampled_from(["license", "tags", "library_name", "base_model", "language"]), unique=True)
FRONTS = st.none() | KEYS.flatmap(
    lambda keys: st.tuples(*(VALUES.map(lambda value, key=key: f"{key}: {value}\n") for key in keys)).map("".join)
)


@settings(max_examples=150, deadline=None)
@given(bom=st.sampled_from(["", "\ufeff"]), front=FRONTS, eol=st.sampled_from(["\n", "\r\n"]), body=BODIES)
def test_peoples_text_survives_and_a_second_time_changes_nothing(found, bom, front, eol, body):
    head = "" if front is None else f"---\n{front}---\n".replace("\n", eol)
    card = bom + head + body
    place = replace(PLACE, base_model="acme/base", license=None)
    # A line of dashes at the top is taken for front matter, as the Hub takes it.
    assume(front is not None or not re.match(r"[ \t\r\n]*---[\r\n]", body))
    new, remarks = updated_card(card, found, place)
    assert updated_card(new, found, place) == (new, remarks)
    assert new.startswith(bom)
    kept, _, after = new.partition(BEGIN)
    assert kept.rstrip().removesuffix("# old-anchor").rstrip().endswith(body.rstrip())
    assert body in new
    assert after.rstrip().endswith(END)
    if front is None:
        return
    before, now = yaml.safe_load(front) or {}, front_matter(new)
    assert {key: now[key] for key in before if key != "tags"} == {k: v for k, v in before.items() if k != "tags"}
    old_tags = before.get("tags")
    if isinstance(old_tags, list):
        assert now["tags"] == old_tags + [tag for tag in TAGS if tag not in old_tags]
    lines = [line for line in front.splitlines() if not line.startswith("tags")]
    assert [line for line in new.replace("\r\n", "\n").splitlines() if line in lines][: len(lines)] == lines


PIECES = st.sampled_from(
    ["---\n", "--- \n", "...\n", "\n", "\r", "\r\n", "license: mit", "tags:", " [a]", "- x", "  ", "# c", BEGIN, END,
     "|", "{", "}", "&t ", "*t ", "? tags\n", "'", '"', "~", "\x85", "\u2028", "%YAML 1.1\n", "a,", "[", "]",
     "\t", "\ufeff"]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(start=st.sampled_from(["", "---\n", "---\ntags:\n", "---\ntags: [a]\n"]), pieces=st.lists(PIECES, max_size=12))
def test_any_text_is_refused_or_kept(found, start, pieces):
    try:
        new, remarks = updated_card(start + "".join(pieces), found, PLACE)
    except HubError:
        return
    assert updated_card(new, found, PLACE) == (new, remarks)


# Anchors by somebody who means ill

NASTY = [
    "`", "``", "|", "\\", "\\|", "<script>evil()</script>", "-->", "<!--", BEGIN, END, "\n", "\r\n", "\n\n# evil", "$$",
    "](https://evil.example)", "![evil](x)", "https://evil.example", "www.evil.example", "&lt;b&gt;", "\u202e",
    "\u2028", "\x00", "\ud800", "*", "_", "#", "---", "\n---\n", " ", "a", "|---|", "~~", "\n```\n", "mailto:e@evil.io",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(NASTY), min_size=1, max_size=6).map("".join) | st.text(max_size=12)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
NUMBERS = st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False)
ENTRIES = st.lists(
    st.fixed_dictionaries({"sha256": TEXTS | st.none()}, optional={"name": JUNK, "lambda": JUNK}), max_size=30
)
DATA = st.fixed_dictionaries({}, optional=dict.fromkeys(("spec", "split", "size", "fingerprint"), JUNK))
PARENTS = st.fixed_dictionaries(
    {
        "sha256": TEXTS | st.none(),
        "lambda": NUMBERS,
        "provenance": st.fixed_dictionaries({}, optional={"name": JUNK, "data": JUNK | DATA, "samples": JUNK}),
    }
)
ORIGINS = st.builds(
    Provenance,
    name=TEXTS,
    created=TEXTS | st.none(),
    versions=st.dictionaries(TEXTS, TEXTS, max_size=3),
    checkpoint=st.fixed_dictionaries(
        {},
        optional={
            "file": TEXTS,
            "sha256": TEXTS,
            "format": TEXTS | st.sampled_from(["onnx", "hugging face", "safetensors"]),
            "architecture": TEXTS | st.none(),
        },
    ),
    data=DATA,
    likelihood=TEXTS | st.sampled_from(["categorical", "per-token"]),
    estimator=st.sampled_from(["exact", "sampled", "batched", "none", "mixed"]),
    draws=st.integers(0, 2**62) | st.none(),
    batch_size=st.integers(0, 2**62) | st.none(),
    samples=st.integers(0, 2**62),
    standard_error=st.none() | st.fixed_dictionaries({"trace": NUMBERS}),
    seed=NUMBERS,
    curvature=st.sampled_from(["diagonal", "kfac", "identity"]),
    importance=st.lists(
        st.fixed_dictionaries(
            {"layer": TEXTS, "parameters": NUMBERS, "share": NUMBERS, "mean": NUMBERS, "max": NUMBERS}
        ),
        max_size=15,
    ),
    merged=st.none()
    | st.fixed_dictionaries(
        {"parents": st.lists(PARENTS, max_size=30)},
        optional={"form": st.just("online"), "gamma": JUNK, "kfac_distance": JUNK},
    ),
    head=st.none() | st.fixed_dictionaries({"id": TEXTS, "parameters": st.lists(TEXTS, max_size=3)}),
    excluded=st.dictionaries(TEXTS, TEXTS, max_size=12),
    normalisation=st.fixed_dictionaries({"statistics": JUNK, "layers": st.lists(TEXTS, max_size=10)}),
    lineage=ENTRIES,
    scores=st.dictionaries(TEXTS, NUMBERS, max_size=3),
    input=st.fixed_dictionaries(
        {"shape": st.lists(st.integers(0, 2**62), max_size=4)},
        optional={"names": JUNK, "flat": JUNK, "bytes_to_unit": JUNK},
    ),
    classes=st.none() | st.lists(TEXTS, max_size=20),
)


@settings(max_examples=100, deadline=None)
@given(origin=ORIGINS)
def test_a_hostile_anchor_cannot_get_out_of_its_place(found, origin):
    """What an anchor says ends up in code spans: no HTML, link, heading, row or cell of a table comes from it."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    try:
        read, _ = read_provenance(json.dumps(origin.to_json()), Path("a.safetensors"))
    except AnchorError:
        assume(False)
    card, _ = updated_card(None, replace(found, provenance=read), replace(PLACE, figure="importance.png"))
    assert updated_card(card, replace(found, provenance=read), replace(PLACE, figure="importance.png"))[0] == card
    assert (card.count(BEGIN), card.count(END), card.count("<!--"), card.count("-->")) == (1, 1, 3, 3)
    card.encode()
    tokens = markdown.parse(card.partition("\n---\n")[2])
    html = [token.content for token in tokens if token.type == "html_block"]
    assert len(html) == 3
    assert all(line.startswith("<!-- ") and line.endswith(" -->") for part in html for line in part.splitlines())
    inline = [child for token in tokens if token.type == "inline" for child in token.children]
    assert {token.content for token in inline if token.type == "html_inline"} <= {"<br>"}
    spans = ("code_inline", "fence", "inline", "image")
    assert not any("evil" in token.content for token in (*inline, *tokens) if token.type not in spans)
    links = [token.attrs["href"] for token in inline if token.type == "link_open"]
    assert all(link.startswith("https://arxiv.org/abs/") for link in links)
    assert {token.attrs["src"] for token in inline if token.type == "image"} <= {"importance.png"}
    assert [token.tag for token in tokens if token.type == "heading_open"].count("h1") == 1
    assert sum(token.type == "table_open" for token in tokens) == 1 + bool(
        read.importance and read.curvature != "identity"
    )
    assert sum(token.type == "fence" for token in tokens) == 3
    # As many cells as bars: markdown-it fills up or cuts rows that have too few or too many.
    for line in card.splitlines():
        if line.startswith("| "):
            assert line.count("|") in (3, 6)


@given(text=TEXTS)
def test_code_is_one_span_that_nothing_ends(text):
    found = code(text)
    assert found[0] == found[-1] == "`"
    assert not set(found[1:-1]) & set("`|<>\n\r")
    assert found[1:-1].strip() == found[1:-1] != ""
    assert len(found) <= 202
