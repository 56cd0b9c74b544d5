"""What results show of themselves in a notebook: tables in which nothing of a stranger's is code, and figures."""

import io
from html.parser import HTMLParser

import pytest
import torch
from matplotlib.figure import Figure
from support.domains import blobs
from support.models import Small, trained

import ewc_finetune as ewc
from ewc_finetune.specs.html import html_table

EVIL = "<img src=x onerror=alert(1)>"


class Cells(HTMLParser):
    """Reads the texts of the cells, and the tags that there are."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.tags = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)

    def handle_data(self, data):
        self.texts.append(data)


def table(result):
    """Check that a result shows a table of texts alone, and return these."""
    read = Cells(result._repr_html_())
    assert {"table", "td"} <= read.tags <= {"table", "thead", "tbody", "caption", "tr", "th", "td"}
    return read.texts


def drawn(figure):
    """Check that it is a figure that can be written."""
    assert isinstance(figure, Figure)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue()[:4] == b"\x89PNG"
    return [axes.get_xlabel() for axes in figure.axes]


@pytest.fixture(scope="module")
def anchor():
    return ewc.consolidate(trained(Small(), torch.float32), blobs(), name=EVIL, probe=5)


def test_an_anchor(anchor):
    texts = table(anchor)
    assert f"anchor {EVIL}" in texts
    assert "holds" in texts
    assert any("exact" in text and "diagonal Fisher" in text for text in texts)


def test_a_fine_tune(anchor):
    data = {EVIL: blobs(), "new": blobs(shift=4.0, seed=1)}
    done = ewc.finetune(
        trained(Small(), torch.float32), data["new"], anchors=anchor, eval_on=data, epochs=2, metrics=["f1"]
    )
    texts = table(done)
    assert {EVIL, "f1 before", f"{done.after['new'].metrics['f1']:.4g}", "unchanged", "Small: 4 steps"} <= {*texts}
    assert drawn(done.plot()) == ["step", "step (0: before)"]
    unscored = ewc.finetune(trained(Small(), torch.float32), data["new"], eval_on=[], epochs=1)
    assert table(unscored) == ["Small: 2 steps"]
    assert drawn(unscored.plot()) == ["step"]
    assert drawn(ewc.finetune(trained(Small(), torch.float32), data["new"], eval_on=[], epochs=0).plot()) == [""]


def test_a_sweep(anchor, tmp_path):
    data = {"old": blobs(), "new": blobs(shift=4.0, seed=1)}
    done = ewc.sweep(
        trained(Small(), torch.float32), data["new"], anchors=anchor, lambdas=[1.0, 100.0], epochs=1, eval_on=data,
        output=tmp_path / "s.sweep", architecture="x:Y",
    )  # fmt: skip
    texts = table(done)
    assert {"lambda", "retention", "plain", "100"} <= {*texts}
    assert f"{tmp_path / 's.sweep'}: 3 runs" in texts
    (label,) = drawn(done.plot())
    assert "new domain" in label


def test_a_mending(anchor, tmp_path):
    new = blobs(shift=4.0, seed=1)
    model = ewc.finetune(trained(Small(), torch.float32), new, epochs=2, eval_on=[]).model
    done = ewc.mend(model, new, anchors=anchor, ratios=[0.1, 1.0], eval_on={EVIL: new})
    texts = table(done)
    assert {EVIL, "taken", done.why} <= {*texts}
    drawn(done.plot())


def test_a_table_without_rows_is_nothing():
    assert html_table(["a"], [], "caption") == ""
    assert html_table((), [("a", "b")]) == "<table><tbody><tr><td>a</td><td>b</td></tr></tbody></table>"
