"""Charts as the page and files have them: all that is drawn is in them, in few bytes, whatever it is called."""

import math
import re

import matplotlib
import pytest

from ewc_finetune.errors import UsageError
from ewc_finetune.reporting.figure import draw_run
from ewc_finetune.reporting.plots import Axis, Chart, Curve, draw_charts, draw_importance, to_svg

NASTY = "<script>alert('$a$ & $b')</script>\"'"


def chart(points, labels=(), **y):
    return Chart("a title", [Curve("a", "k0", points, labels)], Axis("x"), Axis("y", **y))


def ticks(svg):
    """Return the numbers beside the axes, those below first."""
    return re.findall(r">([^<>]*)</text>", svg)


def line(svg):
    """Return the points of the line, in pixels."""
    path = re.search(r'<g class="line">\s*<path d="([^"]*)"', svg).group(1)
    return [tuple(map(float, pair)) for pair in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)]


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [1e-12, 3e-12], [-3.0, 1e9], [97.1, 97.2], [0.0, 1e-300]])
@pytest.mark.parametrize("axis", [{}, {"whole": True}, {"holds": (0,)}, {"falling": True}, {"log": True}])
def test_axes_hold_their_values_with_few_round_numbers(values, axis):
    values = [abs(value) or 1.0 for value in values] if "log" in axis else values
    svg = to_svg(chart([(float(n), value) for n, value in enumerate([*values, values[0]])], **axis))
    texts = ticks(svg)
    below, beside = texts[: texts.index("x")], texts[texts.index("x") + 1 : texts.index("y")]
    for numbers in (below, beside):
        assert 2 <= len(numbers) <= 9
        assert len(set(numbers)) == len(numbers)
        assert all(len(text) < 9 for text in numbers)
    assert all(0 < x < 420 and 0 < y < 290 for x, y in line(svg))


def test_long_curves_take_little_and_keep_their_peaks():
    points = [(float(n), math.sin(n)) for n in range(100_000)] + [(100_000.0, 7.0)]
    svg = to_svg(chart(points))
    assert len(svg) < 40_000
    drawn = line(svg)
    assert min(drawn, key=lambda point: point[1]) == max(drawn)


def test_the_colours_are_those_of_the_page():
    svg = to_svg(chart([(0.0, 1.0), (1.0, 2.0)], labels=["1", "2"]))
    assert not re.search("#[0-9a-f]{6}|<style|<script|font", svg)
    assert set(re.findall(r"var\(--(\w+)\)", svg)) == {"k0", "page", "ink", "soft", "grid"}


def test_labels_are_text_and_points_say_what_they_are():
    svg = to_svg(chart([(0.0, 1.0), (1.0, 2.0)], labels=[NASTY, "2"]))
    assert "<script" not in svg
    assert "<title>2: x 1, y 2</title>" in svg
    assert ">2</text>" in svg
    assert "alert('$a$ &amp; $b')" in svg


def test_neither_the_time_nor_settings_change_a_byte(tmp_path):
    drawn = chart([(0.0, 1.0), (1.0, 2.0)], labels=["$^$", "_b"])
    first = to_svg(drawn)
    with matplotlib.rc_context({"text.color": "red", "svg.fonttype": "path", "lines.linewidth": 9}):
        assert to_svg(drawn) == first
    for ending in ("svg", "png", "pdf"):
        paths = [tmp_path / f"{name}.{ending}" for name in "ab"]
        for path in paths:
            draw_charts(path, [drawn, drawn], NASTY)
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_files_of_any_names(tmp_path):
    score = {"loss": 0.5, "accuracy": 0.9, "perplexity": None}
    lines = [{"step": 0, "scores": {NASTY: score}}, {"step": 5, "epoch": 1, "loss": 1.0, "penalty": 0.0}]
    draw_run(tmp_path / "a.svg", lines, NASTY)
    text = (tmp_path / "a.svg").read_text()
    assert "<script" not in text
    assert "accuracy, %" in text
    assert "task loss" in text
    draw_run(tmp_path / "a.png", [], "nothing was logged")
    draw_importance(tmp_path / "a.pdf", [{"layer": "a$^$b", "share": 1.0}], "$$")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(UsageError, match=r"should end in .png, .pdf, .svg"):
        draw_importance(tmp_path / "a.jpg", [], "")
