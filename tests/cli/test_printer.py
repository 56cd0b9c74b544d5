"""What a run says while it goes on."""

import json
import sys
from types import ModuleType, SimpleNamespace

from tqdm import tqdm
from tqdm.notebook import tqdm_notebook

from ewc_finetune.cli.printer import Printer

BASE = ("finetune", "--model", "mlp?hidden=16", "--data", "digits", "--output", "m.pt")


def test_verbose_and_quiet(ewc_ft):
    loud = ewc_ft(*BASE, "--epochs", 1, "--log-every", 5, "--verbose")
    assert loud.stderr.count("step ") >= 4
    assert "step 5: loss " in loud.stderr
    assert "lr 0.0001" in loud.stderr
    plain = ewc_ft(*BASE, "--epochs", 1, "--overwrite")
    assert "step 5: loss" not in plain.stderr
    assert " (epoch 1): digits 0." in plain.stderr
    quiet = ewc_ft(*BASE, "--epochs", 1, "--overwrite", "--quiet", "--json")
    assert quiet.stderr == ""
    assert json.loads(quiet.stdout)["steps"] == 15


def test_without_a_terminal_a_line_a_minute(monkeypatch, capsys):
    times = iter([0.0, 30.0, 61.0, 70.0, 122.0])
    monkeypatch.setattr("ewc_finetune.cli.printer.time.monotonic", lambda: next(times))
    with Printer().bar("fine-tuning on digits", 4000, "step") as bar:
        for _ in range(4):
            bar.advance(500, loss=0.51234, penalty=0.1)
    assert capsys.readouterr().err.splitlines() == [
        "fine-tuning on digits: 1,000 of 4,000 steps (25%), 03:03 left, loss 0.512, penalty 0.1",
        "fine-tuning on digits: 2,000 of 4,000 steps (50%), 02:02 left, loss 0.512, penalty 0.1",
    ]


def test_no_total_and_no_figures(monkeypatch, capsys):
    monkeypatch.setattr("ewc_finetune.cli.printer._SECONDS_BETWEEN_LINES", 0.0)
    with Printer().bar("Fisher", None, "sample") as bar:
        bar.advance(1500)
    with Printer(quiet=True).bar("Fisher", None, "sample") as bar:
        bar.advance(1500)
    assert capsys.readouterr().err == "Fisher: 1,500 samples\n"


def test_a_notebook_has_its_own_bars_if_it_has_widgets(monkeypatch, capsys):
    """Where there are none, tqdm warns, which nobody needs to see: there are lines instead."""
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    for name in ("tqdm.auto", "tqdm.autonotebook"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("tqdm.notebook.IProgress", None)
    printer = Printer()
    with printer.bar("work", 3, "step") as bar:
        bar.advance(3)
    assert capsys.readouterr().err == ""
    made = []

    class Widget(tqdm_notebook):
        def __init__(self, **options):
            made.append(options["desc"])
            tqdm.__init__(self, disable=True)

    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Widget))
    with printer.bar("work", 3, "step") as bar:
        bar.advance(3, loss=0.5)
    assert made == ["work"]
