"""`ewc-ft report`: what it says, what it makes of odd runs, and in Chromium how it looks."""

import copy
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from support.run_folders import (
    LAYERS,
    MOVES,
    anchor,
    history,
    origin,
    score,
    search,
    write_language_model,
    write_plain,
    write_run,
    write_sweep,
)

import ewc_finetune
from ewc_finetune.errors import EwcError, StorageError
from ewc_finetune.reporting.measures import MINUS, NOTHING
from ewc_finetune.reporting.outcome import new_domain
from ewc_finetune.runs.record import read_run

MISSING = object()


class _Page(HTMLParser):
    """A page's text, in pieces, and its elements."""

    def __init__(self, html):
        super().__init__()
        self.pieces, self.elements, self._skipped = [], [], False
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._skipped = tag == "style"

    def handle_endtag(self, tag):
        self._skipped = False

    def handle_data(self, data):
        if not self._skipped and data.strip():
            self.pieces.append(" ".join(data.split()))

    @property
    def text(self):
        return " ".join(self.pieces)


def page_of(*runs, **options):
    made = ewc_finetune.report(list(runs), **options)
    html = made.path.read_text(encoding="utf-8")
    assert not re.search(r"\b(NaN|nan|inf|Infinity|None|Undefined)\b", _Page(html).text)
    return _Page(html)


def probes(unchanged, divergence):
    return [{"anchor": "mnist", "data": "mnist", "samples": 512, "divergence": divergence, "unchanged": unchanged}]


# What it says


def test_one_run_says_its_outcome_and_all_that_belongs_to_it(tmp_path):
    page = page_of(write_run(tmp_path / "model-fmnist.run"))
    assert (
        "Held at lambda 100: accuracy went from 97.6% to 93.3% on mnist (old) and from 8.1% to 85.3% on fmnist (new)."
        in (page.pieces)
    )
    for heading in ("What was kept, what was learned", "Accuracy over the epochs", "Loss and penalty over the steps",
                    "Where the importance sits, and which layers moved", "Provenance", "Do it again"):  # fmt: skip
        assert heading in page.pieces
    assert f"{MINUS}4.3 points" in page.pieces
    assert "41% of the importance sits in hidden.0" in page.text
    assert "cd /home/someone/models ewc-ft finetune --anchors mnist.anchor.safetensors --lambda 100" in page.text
    assert sum(tag == "svg" and a.get("class") == "chart" for tag, a in page.elements) == 2
    assert "together (other lambdas, and 0), or search with --lambda auto" in page.text


def test_provenance_has_every_anchor_with_digests_in_full(tmp_path):
    parents = [{"sha256": "bb" * 32, "lambda": 2.0, "provenance": origin("kmnist")}]
    merged = {"form": "offline", "parents": parents}
    lineage = [{"name": "mnist", "sha256": "a7" * 32, "lambda": 100.0}]
    anchors = [anchor(), anchor("both", 50.0, merged=merged, lineage=lineage)]
    page = page_of(write_run(tmp_path / "a.run", anchors=anchors))
    assert "Anchor 1: mnist" in page.text
    assert "Anchor 2: both" in page.text
    for said in ("mnist, train split, 10,000 of 60,000 samples", "exact, standard error of the trace 2.1%",
                 "diagonal Fisher, merged offline, from 1 anchor", "kmnist, lambda 2",
                 "mnist, lambda 100, SHA-256 a7a7a7a7a7a7", "2 layers, running statistics frozen",
                 "2026-01-04 09:12:00 UTC"):  # fmt: skip
        assert said in page.text
    titles = {attributes.get("title") for tag, attributes in page.elements if tag == "abbr"}
    assert {"3f" * 32, "a7" * 32, "9c" * 32, "51" * 32, "bb" * 32} == titles


def test_several_runs_are_compared_with_plain_fine_tuning(tmp_path):
    page = page_of(write_sweep(tmp_path / "sweep"))
    assert (
        "Of 14 held runs, K-FAC at lambda 10 has the best mean of old and new: accuracy went from 97.6% to 97.3% "
        "on mnist (old; plain fine-tuning: 43.8%) and from 8.1% to 86.5% on fmnist (new; plain fine-tuning: 86.8%)."
    ) in page.pieces
    assert "Frontier" in page.pieces
    assert {"diagonal Fisher, by lambda", "K-FAC, by lambda", "plain fine-tuning"} <= set(page.pieces)
    runs = [attributes for tag, attributes in page.elements if tag == "details" and attributes.get("class") == "run"]
    assert len(runs) == 15
    assert sum("open" in attributes for attributes in runs) == 1  # the best
    names = [piece for piece in page.pieces if re.fullmatch(r"(diagonal|kfac)-\d+|plain", piece)]
    assert names[:4] == ["diagonal-10", "diagonal-30", "diagonal-50", "diagonal-80"]


def seeded(folder, name, strength, seed, kept, **changes):
    after = [score("mnist", kept), score("fmnist", 0.85)]
    options = {"seed": seed, **changes.pop("options", {})}
    return write_run(
        folder / f"{name}.run", anchors=[anchor(strength=strength)], after=after, options=options, **changes
    )


def rows_of(made):
    return {row[0]: dict(zip(made.parts[0].table.header, row, strict=True)) for row in made.parts[0].table.rows}


def test_several_seeds_have_a_mean_and_the_luckiest_does_not_win(tmp_path):
    runs = [seeded(tmp_path, f"a{n}", 100.0, n, kept) for n, kept in enumerate((0.90, 0.92, 0.94))]
    runs += [seeded(tmp_path, f"b{n}", 30.0, n, kept) for n, kept in enumerate((0.96, 0.80, 0.81))]
    made = ewc_finetune.report(runs, output=tmp_path / "r.html")
    assert "Of 6 held runs, lambda 100 has the best mean of old and new over 3 seeds, seed 1 in the middle of them" in (
        made.sentence
    )
    assert "to 92.0% on mnist" in made.sentence
    table = made.parts[0].table
    assert [row[0] for row in table.rows] == ["a0", "a1", "a2", "mean of 3 seeds", "b0", "b1", "b2", "mean of 3 seeds"]
    assert table.rows[3][table.header.index("Kept")] == "92.0% ± 2.0"
    assert table.rows[3][table.header.index("Learned")] == "85.0% ± 0.0"
    assert table.main == 3
    assert "Runs that differ in the seed alone have a mean" in made.parts[0].reading
    only = ewc_finetune.report(runs[:3], output=tmp_path / "s.html")
    assert only.sentence.startswith("Held at lambda 100, seed 1 as the middle one of 3: accuracy went")
    assert only.parts[0].table.main is None
    again = seeded(tmp_path, "again", 100.0, 0, 0.9)  # the same seed twice is no two seeds
    twice = ewc_finetune.report([runs[0], again], output=tmp_path / "t.html")
    assert [row[0] for row in twice.parts[0].table.rows] == ["a0", "again"]


def test_runs_of_unequal_length_say_so(tmp_path):
    short, long = (
        seeded(tmp_path, name, strength, 0, 0.9, steps=steps)
        for name, strength, steps in (("short", 10.0, 300), ("long", 100.0, 2400))
    )
    made = ewc_finetune.report([short, long], output=tmp_path / "r.html")
    assert {name: row["Steps"] for name, row in rows_of(made).items()} == {"short": "300", "long": "2,400"}
    assert "The runs are of unequal length (300 to 2,400 steps)" in made.parts[0].reading
    alike = ewc_finetune.report([long, seeded(tmp_path, "too", 10.0, 0, 0.9)], output=tmp_path / "s.html")
    assert "Steps" not in alike.parts[0].table.header
    assert "unequal" not in alike.parts[0].reading


def test_probes_are_compared_with_what_the_anchor_keeps(tmp_path):
    """A merged anchor's answers are several models', and none of them need be the one that the run began with."""
    page = page_of(write_run(tmp_path / "a.run", retention=probes(0.9, 0.1)))
    assert "whose likeliest answer is the one that the anchor keeps with them" in page.text
    assert "before the run" not in page.text


def test_the_plain_run_beside_one_is_the_one_most_like_it(tmp_path):
    held = write_run(tmp_path / "held.run", options={"seed": 1})
    other = write_plain(tmp_path / "other.run")
    like = write_plain(tmp_path / "like.run", after=[score("mnist", 0.41), score("fmnist", 0.87)])
    document = json.loads((like / "run.json").read_text())
    document["options"]["seed"] = 1
    (like / "run.json").write_text(json.dumps(document))
    said = page_of(held, other, like, output=tmp_path / "a").text
    assert "mnist (old; plain fine-tuning: 41.0%)" in said
    assert "fmnist (new; plain fine-tuning: 87.0%)" in said
    page = page_of(held, other, output=tmp_path / "b")
    assert "The plain run differs in seed too, beside the penalty." in page.pieces


def test_the_plain_run_of_another_model_is_told(tmp_path):
    write_run(tmp_path / "all/held.run")
    other = {"checkpoint": {"sha256": None, "architecture": "cnn"}}
    after = [score("mnist", 0.1), score("fmnist", 0.9)]
    write_run(tmp_path / "all/cnn.run", anchors=[], after=after, found=other)
    page = page_of(tmp_path / "all")
    assert "The plain run differs in the model that it started from too, beside the penalty." in page.pieces
    assert {"Model", "cnn", "mlp?hidden=256,128"} <= set(page.pieces)
    write_plain(tmp_path / "all/plain.run", data="fmnist?augment=flip", options={"lr": 1.0})
    page = page_of(tmp_path / "all")
    assert "plain fine-tuning: 43.8%" in page.text
    assert "The plain run differs in data, lr too, beside the penalty." in page.pieces
    assert {"Data", "fmnist", "fmnist?augment=flip"} <= set(page.pieces)


@pytest.mark.parametrize("anchors", [[], [anchor(strength=0.0)]])
def test_a_plain_run_has_no_importance_to_speak_of(tmp_path, anchors):
    layers = [
        {"layer": layer, "parameters": size, "share": 0.0 if anchors else None, "moved": moved, "penalty": 0.0}
        for (layer, size), moved in zip(LAYERS, MOVES, strict=True)
    ]
    page = page_of(write_run(tmp_path / "a.run", anchors=anchors, layers=layers))
    assert "of the importance sits in" not in page.text
    assert "output moved most, by 20.8%" in page.text


def test_a_run_that_rehearses_is_held_at_any_lambda(tmp_path):
    write_run(tmp_path / "all/plain.run", anchors=[], after=[score("mnist", 0.5), score("fmnist", 0.9)])
    found, options = {"rehearsed": [{"data": "mnist", "samples": 48}]}, {"rehearse": ["probes"]}
    for name, strength, kept in (("alone", 0.0, 0.93), ("both", 10.0, 0.95)):
        after = [score("mnist", kept), score("fmnist", 0.88)]
        held = [anchor(strength=strength)]
        write_run(tmp_path / f"all/{name}.run", anchors=held, after=after, found=found, options=options)
    page = page_of(tmp_path / "all")
    assert "Of 2 held runs, diagonal Fisher + rehearsal at lambda 10 has the best mean of old and new" in page.text
    assert "plain fine-tuning: 50.0%" in page.text
    assert {"diagonal Fisher + rehearsal", "rehearsal", "none", "probes"} <= set(page.pieces)
    assert page_of(tmp_path / "all/alone.run").text.count("Held by rehearsal: accuracy went from 97.6% to 93.0%")
    assert "Held at lambda 10, with rehearsal: " in page_of(tmp_path / "all/both.run").text


def test_a_run_at_lambda_0_is_plain_and_one_on_other_data_is_not_compared(tmp_path):
    write_run(tmp_path / "all/held.run")
    write_run(
        tmp_path / "all/zero.run", anchors=[anchor(strength=0.0)], after=[score("mnist", 0.5), score("fmnist", 0.9)]
    )
    base = [score("mnist", 0.1)], [score("mnist", 0.976)]
    found = {"checkpoint": {"sha256": None, "architecture": "mlp"}}
    write_run(tmp_path / "all/base.run", data="mnist", anchors=[], before=base[0], after=base[1], found=found)
    page = page_of(tmp_path / "all")
    assert "mnist (old; plain fine-tuning: 50.0%)" in page.text
    assert "fmnist (new; plain fine-tuning: 90.0%)." in page.text
    assert (
        "3 runs of 2 kinds, each compared with its own kind alone: 2 learning fmnist and 1 learning mnist."
        in page.pieces
    )
    assert {"Learning fmnist", "Learning mnist"} <= set(page.pieces)
    assert "Trained without a penalty: accuracy went from 10.0% to 97.6% on mnist (new)." in page.pieces


def test_kinds_of_runs_have_parts_of_their_own_and_none_speaks_for_all(tmp_path, ewc_ft):
    write_sweep(tmp_path / "all", kfac=False)
    losses = {n: {"before": [score(n, None, 1.0), score("b", None, 4.0)]} for n in ("a", "c")}
    for name, old, likelihood in (("price", "a", "gaussian"), ("other", "c", "gaussian"), ("counts", "a", "bernoulli")):
        after = [score(old, None, 1.5), score("b", None, 2.0)]
        anchors = [anchor(old, likelihood=likelihood)]
        write_run(
            tmp_path / f"all/{name}.run", anchors=anchors, data="b", after=after, found={"likelihood": likelihood},
            **losses[old],
        )  # fmt: skip
    result = ewc_ft("report", "all", "--json")
    made, page = json.loads(result.stdout), _Page((tmp_path / "all/report.html").read_text())
    assert made["sentence"] == (
        "13 runs of 3 kinds, each compared with its own kind alone: 1 learning b (bernoulli), 10 learning fmnist and 2 "
        "learning b (gaussian)."
    )
    assert made["figures"] == []
    kinds = {kind["heading"]: kind for kind in made["kinds"]}
    assert kinds["Learning fmnist"]["sentence"].startswith("Of 9 held runs, lambda 300 has the best mean")
    assert kinds["Learning b (bernoulli)"]["sentence"] == (
        "Held at lambda 100: loss went from 1 to 1.5 on a (old) and from 4 to 2 on b (new)."
    )
    # Of one kind, and nothing old that both were scored on.
    assert kinds["Learning b (gaussian)"]["sentence"].startswith("Held at lambda 100 (other, one of 2 held runs): ")
    assert [run.rpartition("/")[2] for run in kinds["Learning b (gaussian)"]["runs"]] == ["other.run", "price.run"]
    assert "Not all of the runs were scored on c and a, so what was kept is compared on no old data." in page.text
    assert page.text.count("anchored to") == 0
    assert all(f"{heading}: {kind['sentence']}" in result.stderr for heading, kind in kinds.items())


def test_the_frontier_of_one_run_is_that_of_its_search(tmp_path):
    page = page_of(write_run(tmp_path / "a.run", search=search(), options={"lambda": "auto"}))
    assert "trials of the search" in page.pieces
    assert "found by search" in page.pieces
    assert {"3.1", "12.4", "24.8", "49.6", "plain"} <= set(page.pieces)
    page = page_of(write_run(tmp_path / "b.run", search=search(watched=False), options={"lambda": "auto"}))
    assert "trials of the search" not in page.pieces


def test_where_no_old_domain_was_scored_the_probes_speak(tmp_path):
    before, after = [score("fmnist", 0.08)], [score("fmnist", 0.85)]
    page = page_of(write_run(tmp_path / "a.run", before=before, after=after, retention=probes(0.951, 0.041)))
    assert "95.1% of the probes of mnist are answered as before, and accuracy went from 8.0% to 85.0%" in page.text
    assert "No old domain was scored" in page.text
    page = page_of(write_run(tmp_path / "b.run", before=before, after=after))
    assert "to 85.0% on fmnist (new); what it kept of the old was not measured." in page.text
    assert "--eval" in page.text
    assert "consolidate --probe" in page.text
    page = page_of(write_run(tmp_path / "c.run", before=before, after=after, retention=probes(None, 0.041)))
    assert "0.041 nats" in page.text


def test_several_runs_with_probes_alone_have_a_frontier(tmp_path):
    for strength, unchanged, learned in ((10.0, 0.81, 0.87), (100.0, 0.95, 0.85)):
        write_run(
            tmp_path / f"all/{strength:g}.run", anchors=[anchor(strength=strength)],
            before=[score("fmnist", 0.08)], after=[score("fmnist", learned)], retention=probes(unchanged, 0.04),
        )  # fmt: skip
    page = page_of(tmp_path / "all")
    assert "probes answered as before, %" in page.text
    assert "Of 2 held runs, lambda 100 has the best mean" in page.text


def test_language_models_go_by_perplexity_and_regressions_by_loss(tmp_path):
    for name, strength, kept, learned in (("plain", 0, 108.5, 60.3), ("a", 30.0, 62.0, 63.4), ("b", 100.0, 53.7, 66.9)):
        write_language_model(tmp_path / "lm", name, strength, kept, learned)
    page = page_of(tmp_path / "lm")
    assert "perplexity went from 43.9 to 53.7 on hf:code.jsonl (old; plain fine-tuning: 108.5)" in page.text
    assert "from 195.0 to 66.9 on hf:prose.jsonl (new; plain fine-tuning: 60.3)." in page.text
    assert "lies up and to the right" in page.text
    curve = [score("csv:old.csv", None, 0.0032), score("csv:new.csv", None, 1.2)]
    after = [score("csv:old.csv", None, 0.0097), score("csv:new.csv", None, 0.0056)]
    page = page_of(write_run(tmp_path / "c.run", data="csv:new.csv", before=curve, after=after))
    assert (
        "loss went from 0.0032 to 0.0097 on csv:old.csv (old) and from 1.2 to 0.0056 on csv:new.csv (new)." in page.text
    )


def test_a_new_domain_without_a_score_is_named(tmp_path):
    page = page_of(write_run(tmp_path / "a.run", data="other"))
    assert "on fmnist (old); other was not scored." in page.text


def test_more_than_two_old_domains_are_averaged(tmp_path):
    names = [f"mnist?permute={n}" for n in range(9)]
    before = [score(name, 0.9) for name in names]
    page = page_of(write_run(tmp_path / "a.run", data="mnist?permute=8", before=before, after=before))
    assert (
        "from 90.0% to 90.0% in the mean over 8 domains (old) and from 90.0% to 90.0% on mnist?permute=8" in page.text
    )


@pytest.mark.parametrize(
    ("target", "domains", "expected"),
    [
        ("fmnist", ["mnist", "fmnist"], "fmnist"),
        ("fmnist?split=train", ["mnist", "fmnist"], "fmnist"),
        ("fmnist?limit=500", ["mnist", "fmnist"], "fmnist"),
        ("fmnist?limit=500", ["fmnist", "fmnist?limit=500&split=test"], "fmnist?limit=500&split=test"),
        ("mnist?permute=1", ["mnist", "mnist?permute=1"], "mnist?permute=1"),
        ("mnist?permute=1", ["mnist"], None),
        ("fmnist?augment=flip", ["mnist", "fmnist"], "fmnist"),
        ("fmnist?augment=flip", ["fmnist", "fmnist?augment=flip"], "fmnist?augment=flip"),
        ("fmnist?augment=flip&limit=9", ["mnist", "fmnist"], "fmnist"),
        ("what a caller calls it??", ["old"], None),
    ],
)
def test_the_new_domain_is_found_by_its_address(target, domains, expected):
    assert new_domain(target, domains) == expected


# Odd runs


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            "failed: the loss is not finite at step 1300. Lower --lr",
            "The run failed after epoch 2 (the loss is not finite at step 1300): accuracy went from",
        ),
        ("interrupted", "The run was interrupted after epoch 2: accuracy went from"),
        ("running", "The run is still going, or was killed, after epoch 2: accuracy went from"),
    ],
)
def test_an_unfinished_run_shows_what_there_is(tmp_path, status, said):
    lines = "".join(json.dumps(line) + "\n" for line in history(*_scores(), epochs=2)) + '{"step": 1250, "epo'
    changes = dict.fromkeys(("ended", "after", "layers", "steps", "seconds"))
    page = page_of(write_run(tmp_path / "a.run", lines=lines, status=status, **changes))
    assert said in page.text
    assert f"Status: {status}" in page.text
    assert "epoch 2" in page.pieces
    assert "41.2%" in page.pieces  # of the anchors' own importance


def _scores():
    return [score("mnist", 0.97), score("fmnist", 0.08)], [score("mnist", 0.93), score("fmnist", 0.85)]


def test_a_run_without_lines_or_scores_is_shown(tmp_path):
    folder = write_run(tmp_path / "a.run", lines="", before=[], after=[], layers=None, command=None)
    (folder / "metrics.jsonl").unlink()
    page = page_of(folder)
    assert "Held at lambda 100: nothing was scored." in page.pieces
    assert "The run was made from Python, and no command does the same." in page.pieces
    page = page_of(write_run(tmp_path / "b.run", lines="", before=None, after=None, status="running"))
    assert "before its first epoch was done: nothing was scored." in page.text


def test_what_is_not_finite_is_a_dash(tmp_path):
    lines = [{"step": n, "epoch": 1, "loss": math.nan, "penalty": math.inf, "lr": 1e-4} for n in (50, 100)]
    bad = [score("mnist", math.nan, math.inf), score("fmnist", 0.8)]
    bad[0]["accuracy"] = math.nan
    layers = [{"layer": "bias", "parameters": 3, "share": math.nan, "moved": math.inf, "penalty": math.nan}]
    page = page_of(write_run(tmp_path / "a.run", lines=lines, after=bad, layers=layers))
    assert NOTHING in page.pieces


def test_everything_is_escaped(tmp_path):
    nasty = "<script>alert('a&b')</script>\"'"
    folder = write_run(
        tmp_path / "<b>&amp;.run",
        data=f"csv:{nasty}",
        anchors=[anchor(nasty, excluded={nasty: nasty}, lineage=[{"name": nasty, "sha256": nasty, "lambda": nasty}])],
        before=[score(nasty, 0.9), score(f"csv:{nasty}", 0.1)],
        after=[score(nasty, 0.8), score(f"csv:{nasty}", 0.9)],
        layers=[{"layer": nasty, "parameters": 3, "share": 0.5, "moved": 0.1, "penalty": 0.1}],
        status=f"failed: {nasty}",
        command=nasty,
        folder=nasty,
        platform=nasty,
        search=search(),
    )
    page = page_of(folder, title=nasty)
    assert "script" not in {tag for tag, _ in page.elements}
    assert page.text.count(nasty) >= 10
    assert [attributes for _, attributes in page.elements if any(name.startswith("on") for name in attributes)] == []


def test_sixty_layers_begin_with_those_that_matter(tmp_path):
    layers = [
        {"layer": f"encoder.layer.{n}", "parameters": 10, "share": n / 1770, "moved": 0.1, "penalty": 0}
        for n in range(60)
    ]
    page = page_of(write_run(tmp_path / "a.run", layers=layers))
    assert "The 12 that matter most of 60." in page.pieces
    assert page.pieces.count("encoder.layer.59") == 2
    assert page.pieces.count("encoder.layer.1") == 1


def test_a_long_history_makes_a_small_page(tmp_path):
    lines = [{"step": n, "epoch": 1, "loss": 1 / (1 + n) + 0.1, "penalty": 0.01, "lr": 1e-4} for n in range(100_000)]
    made = ewc_finetune.report(write_run(tmp_path / "a.run", lines=lines))
    assert made.path.stat().st_size < 60_000


# Where it goes, and what is refused


def test_the_page_goes_where_one_expects_it_and_replaces_only_reports(ewc_ft, tmp_path):
    write_run(tmp_path / "a.run")
    write_plain(tmp_path / "b.run")
    made = json.loads(ewc_ft("report", "a.run", "--json", "--quiet").stdout)
    assert made["report"] == "a.run/report.html"
    assert made["sentence"].startswith("Held at lambda 100")
    assert made["figures"][0]["value"] == "93.3%"
    assert made["runs"][0]["after"][0]["accuracy"] == 0.9331
    first = (tmp_path / "a.run/report.html").read_bytes()
    assert "Held at lambda 100" in ewc_ft("report", "a.run").stderr
    assert (tmp_path / "a.run/report.html").read_bytes() == first
    ewc_ft("report", "a.run", "b.run")
    assert (tmp_path / "report.html").exists()
    assert "exists" in ewc_ft("report", "a.run", "-o", "report.html", expect=1).stderr
    ewc_ft("report", "a.run", "-o", "report.html", "--overwrite", "--title", "A title")
    assert "<title>A title</title>" in (tmp_path / "report.html").read_text()
    (tmp_path / "a.run/report.html").write_text("my own notes")
    assert "exists" in ewc_ft("report", "a.run", expect=1).stderr
    assert "one of the inputs" in ewc_ft("report", "a.run", "-o", "a.run/run.json", "--overwrite", expect=2).stderr


def test_a_run_named_twice_counts_once(tmp_path):
    write_run(tmp_path / "all/a.run")
    assert len(ewc_finetune.report([tmp_path / "all", tmp_path / "all/a.run"]).parts[0].sections) == 1


def test_torch_is_not_imported(tmp_path):
    folder = write_run(tmp_path / "a.run")
    code = (
        "import sys; from ewc_finetune.cli import main; main(['report', sys.argv[1]], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"status": "running"', "is damaged: it is not a JSON document"),
        ("[1]", "should be a JSON object"),
        ('{"a": 1}', "is not the record of a run"),
        ('{"status": "finished", "options": {}}', "of one by an ewc-ft before runs had a format"),
        ('{"format": "ewc-run", "format_version": 2}', "is of format version 2; this ewc-ft reads up to 1"),
        ("[" * 100_000, "is damaged"),
        (b"\xff\xfe\x00", "it is no text"),
    ],
)
def test_damaged_runs_are_refused_with_a_sentence(ewc_ft, tmp_path, text, said):
    (tmp_path / "a.run").mkdir()
    (tmp_path / "a.run/run.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    error = ewc_ft("report", "a.run", expect=1).stderr
    assert said in error
    assert "a.run/run.json" in error


def test_a_run_that_has_not_begun(ewc_ft, tmp_path):
    folder = write_run(tmp_path / "a.run")
    document = json.loads((folder / "run.json").read_text())
    del document["found"]
    (folder / "run.json").write_text(json.dumps(document))
    assert "was stopped before it began to train" in ewc_ft("report", "a.run", expect=1).stderr


def test_what_is_no_run_is_refused_with_a_sentence(ewc_ft, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.pt").touch()
    assert "holds none" in ewc_ft("report", "empty", expect=1).stderr
    assert "is a file" in ewc_ft("report", "model.pt", expect=1).stderr
    assert "does not exist" in ewc_ft("report", "nowhere.run", expect=1).stderr
    ewc_ft("report", expect=2)


def test_a_cut_off_last_line_is_ignored_and_a_damaged_one_before_is_not(tmp_path):
    whole = '{"step": 1, "epoch": 1, "loss": 1.0, "penalty": 0.0}\n'
    assert len(read_run(write_run(tmp_path / "a.run", lines=whole + whole[:20])).lines) == 1
    folder = write_run(tmp_path / "b.run", lines=whole[:20] + "\n" + whole)
    with pytest.raises(StorageError, match=r"metrics\.jsonl is damaged"):
        read_run(folder)


def test_no_value_anywhere_makes_a_traceback(tmp_path):
    """Whatever a hand or a bug puts into a record: a page or a sentence."""
    folder = write_run(tmp_path / "a.run", search=search(), retention=probes(0.9, 0.1))
    document = json.loads((folder / "run.json").read_text())
    lines = [
        {"step": 0, "epoch": 0, "scores": {"mnist": score("mnist", 0.9)}},
        {"step": 5, "epoch": 1, "loss": 1.0, "penalty": 0.1, "retention": probes(0.9, 0.1)},
        {"step": 9, "epoch": 2, "loss": 0.5, "penalty": 0.1, "scores": {"mnist": score("mnist", 0.9)}},
    ]
    whole = {"run": document, "lines": lines, "more": lines[1:]}
    for path in _paths(whole):
        for value in (MISSING, None, "x", -1, 1e308, [], {}, [1], True, {"a": 1}):
            changed = copy.deepcopy(whole)
            place = changed
            for key in path[:-1]:
                place = place[key]
            if value is MISSING:
                del place[path[-1]]
            else:
                place[path[-1]] = value
            parts = [part for part in (changed.get("lines"), changed.get("more")) if isinstance(part, list)]
            written = [line for part in parts for line in part]
            (folder / "run.json").write_text(json.dumps(changed.get("run")))
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
            try:
                ewc_finetune.report(folder)
            except EwcError:
                pass
            except Exception as error:
                raise AssertionError(f"{path}: {value!r}") from error


def _paths(value, path=()):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))
