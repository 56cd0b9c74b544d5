"""An option that does nothing is said, in one line, and only if it was given."""

import dataclasses
import json

import pytest
import torch
from support.domains import noise
from support.models import Small, trained
from support.notes import Notes
from torch import nn

import ewc_finetune as ewc
from ewc_finetune.curvature.options import ConsolidateOptions
from ewc_finetune.data.domain import as_domain
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.mending.options import MendOptions
from ewc_finetune.penalty.options import MergeOptions
from ewc_finetune.runs import idle


def told(verb, *arguments, **options):
    notes = Notes()
    verb(*arguments, progress=notes, **options)
    return notes.about("does nothing")


@pytest.fixture(scope="module")
def anchor():
    return ewc.consolidate(trained(Small(), torch.float32), noise(), probe=20)


OLD = as_domain(noise(), "old")
PLAIN = {
    "momentum": ({"momentum": 0.5}, "only sgd has one, and the optimizer is adam"),
    "lambda": ({"lambdas": 3.0}, "without --anchors there is no penalty"),
    "penalty-form": ({"penalty_form": "proximal"}, "without --anchors there is no penalty"),
    "lineage": ({"lineage": "latest"}, "it is for several anchors that pull together"),
    "tolerance": ({"tolerance": 0.1}, "it is for --lambda auto"),
    "select-on": (
        {"select_on": [OLD]},
        "it chooses for --keep best, --patience or --lambda auto; its data is only scored",
    ),
    "workers": ({"workers": 2}, "the data is in memory, or comes in batches of its own"),
    "tensorboard": ({"tensorboard": True}, "without an output there is no run folder to write to"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_of_a_plain_run(name):
    options, why = PLAIN[name]
    said = told(ewc.finetune, trained(Small(), torch.float32), noise(), epochs=0, eval_on=[], **options)
    assert said == [f"--{name} does nothing: {why}"]


def test_where_they_do_something_nothing_is_said(anchor, tmp_path):
    def run(**options):
        said = told(ewc.finetune, trained(Small(), torch.float32), noise(), epochs=0, eval_on=[], **options)
        assert not said

    run()
    run(optimizer="sgd", momentum=0.5, norm_stats="update")
    run(anchors=anchor, lambdas=3.0, penalty_form="proximal")
    run(anchors=[anchor.save(tmp_path / f"{name}.safetensors").path for name in "ab"], lineage="latest")
    run(select_on=[OLD], keep="best")
    run(select_on=[OLD], patience=1)
    run(select_on=[])


def test_of_a_search_and_of_layers_that_are_not_there(anchor):
    torch.manual_seed(0)
    said = told(
        ewc.finetune, trained(Small(), torch.float32), noise(), anchors=anchor, lambdas="auto", tolerance=0.1,
        retain=0.01, epochs=1, eval_on=[],
    )  # fmt: skip
    assert said == ["--tolerance does nothing: --lambda auto goes by --retain or --select-on"]
    bare = nn.Sequential(nn.Linear(4, 3))
    assert told(ewc.finetune, bare, noise(), norm_stats="frozen", epochs=0, eval_on=[]) == [
        "--norm-stats does nothing: the model has no normalisation layers"
    ]


def test_of_consolidate_and_merge(anchor):
    model = trained(Small(), torch.float32)
    assert told(ewc.consolidate, model, noise(), rtol=0.1) == ["--rtol does nothing: it is for --samples auto"]
    assert not told(ewc.consolidate, model, noise(), rtol=0.5, samples="auto")
    assert told(ewc.consolidate, model, noise(), curvature="identity", rules=False) == [
        "--no-rules does nothing: no gradient is taken for the curvature identity"
    ]
    whole = {"kfac_rank": "full", "kfac_dtype": "float32"}
    why = "--kfac-dtype does nothing: factors that are kept whole (--kfac-rank full) are in float32"
    notes = Notes()
    blocks = ewc.consolidate(model, noise(), curvature="kfac", progress=notes, **whole)
    assert notes.about("does nothing") == [why]
    assert told(ewc.merge, [blocks, blocks], **whole) == [why]
    assert told(ewc.merge, [anchor], lineage="latest") == ["--lineage does nothing: it is for several anchors"]
    assert told(ewc.merge, [anchor], online=True, gamma=0.5) == ["--gamma does nothing: it is for several anchors"]
    assert not told(ewc.merge, [anchor, anchor], online=True, gamma=0.5)


def test_what_is_listed_are_options():
    for options, rows in (
        (FinetuneOptions, idle.FINETUNE),
        (ConsolidateOptions, idle.CONSOLIDATE),
        (MergeOptions, idle.MERGE),
        (MendOptions, idle.MEND),
    ):
        known = {field.name for field in dataclasses.fields(options)}
        assert all(row.option in known for row in rows)


def test_the_command_line(ewc_ft):
    base = ("--data", "digits?limit=60", "--epochs", 1)
    result = ewc_ft("finetune", "--model", "mlp?hidden=8", *base, "-o", "m.pt", "--momentum", 0.5, "--lambda", 10)
    assert result.stderr.count("--momentum does nothing: only sgd has one") == 1
    assert result.stderr.count("--lambda does nothing: without --anchors") == 1
    assert result.stderr.count("does nothing") == 2
    ewc_ft("consolidate", "m.pt", "--data", "digits?limit=60", "-o", "a.safetensors", "--probe", 20)
    result = ewc_ft(
        *("sweep", "--anchors", "a.safetensors", *base, "--lambda", "1,10", "--eval", "digits?limit=40"),
        *("--momentum", 0.5, "-o", "s", "--json"),
    )
    assert result.stderr.count("--momentum does nothing") == 1
    assert json.loads(result.stdout)
