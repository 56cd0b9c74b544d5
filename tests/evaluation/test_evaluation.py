"""The scores of several domains: a list, also by name, and a table."""

import pytest
import torch
from support.domains import blobs
from support.models import Small, trained

import ewc_finetune as ewc


def test_by_place_and_by_name():
    data, model = {"old": blobs(), "new": blobs(shift=4.0, seed=1)}, trained(Small(), torch.float32)
    scores = ewc.evaluate(model, data)
    assert isinstance(scores, ewc.Evaluation)
    assert [score.domain for score in scores] == ["old", "new"]
    assert (scores["old"], scores["new"]) == (scores[0], scores[-1])
    assert scores[:1] == [scores["old"]] == list(scores)[:1]
    kept, learned = scores
    assert kept.accuracy == ewc.evaluate(model, data["old"])[0].accuracy
    assert learned.samples == 120
    with pytest.raises(KeyError, match="no domain is called 'odl'. Did you mean 'old'"):
        scores["odl"]
    assert hash(kept) == hash(scores["old"])


def test_a_table_of_what_strangers_named():
    scores = ewc.evaluate(trained(Small(), torch.float32), {"<script>": blobs()}, metrics=["f1"])
    shown = scores._repr_html_()
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert f"<td>{scores[0].accuracy:.4f}</td><td>{scores[0].metrics['f1']:.4g}</td>" in shown
    assert ewc.Evaluation()._repr_html_() == ""
