"""Charts, drawn by matplotlib: in files, and as SVG that takes its colours from the page that it stands in."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from ewc_finetune.errors import UsageError
from ewc_finetune.reporting.measures import signed
from ewc_finetune.storage.atomic import atomic_write

Point = tuple[float, float]

# The formats of files, and where in them matplotlib would write the time.
FORMATS: dict[str, dict[str, Any]] = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
# What the page's style calls its colours, and what they are in light mode and in files.
COLOURS = {
    "page": "#fbfaf8", "ink": "#1c1d20", "soft": "#5b5e66", "grid": "#e8e6e0", "plain": "#74777f", "k0": "#1f5fae",
    "k1": "#bf4e0b", "k2": "#0d7a5f", "k3": "#8b3d8f", "k4": "#806000", "k5": "#b03060",
}  # fmt: skip
# The size of a chart on the page in pixels: as it is on a phone or in two columns, so that its text keeps its size.
_WIDTH = 420
_HEIGHT = 290
# How wide a digit may be in whatever sans serif the page has, in pixels.
_CHARACTER = 9.2
# Up to so many points of a line are marked.
_MARKED = 20
# Where a label may stand beside its point: how far off in points, and which of its corners or sides is there.
_BESIDE = (
    (7, 7, "left", "bottom"), (10, 0, "left", "center"), (0, 10, "center", "bottom"), (-7, 7, "right", "bottom"),
    (-10, 0, "right", "center"), (7, -7, "left", "top"), (0, -10, "center", "top"), (-7, -7, "right", "top"),
)  # fmt: skip
_STYLE = {
    "axes.autolimit_mode": "round_numbers",
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["soft"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": COLOURS["soft"],
    "axes.labelpad": 8,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 1,
    "legend.frameon": False,
    "lines.scale_dashes": False,
    "path.simplify_threshold": 1.0,
    "svg.fonttype": "none",
    "text.color": COLOURS["soft"],
    "text.parse_math": False,  # people's names may have a $ in them
    "xtick.major.pad": 6,
    "xtick.color": COLOURS["soft"],
    "ytick.color": COLOURS["soft"],
    "ytick.left": False,
}
# What is changed in the SVG of matplotlib: text is in the page's font, groups have a class where they are marks and no
# name otherwise, and coordinates are in tenths of a pixel.
_CLEANED: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r'style="[^"]*"', lambda found: re.sub(r' ?font[\w-]*: [^;"]*;?', "", found[0])),
    (r'<g id="(line|dot|ring)">', r'<g class="\1">'),
    (r'<g id="dot: ([^"]*)">', r'<g class="dot"><title>\1</title>'),
    (r'<g id="[^"]*">', "<g>"),
    (r' transform="rotate\(-0 [^"]*"', ""),
    (r' [dxy]="[^"]*"', lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0])),
)


@dataclass(frozen=True)
class Curve:
    """One curve, or one set of points.

    Attributes:
        name: For the legend.
        style: Its colour (`COLOURS`); behind it `beside` for a faint line of dots, `again` for a dashed one.
        points: What is drawn, in order of x.
        labels: The text at each point of a scatter plot; a line has none.
        joined: Whether a line goes through the points.
        deviations: How far other runs lie from each point, to both sides; none where that is not known.
    """

    name: str
    style: str
    points: Sequence[Point]
    labels: Sequence[str] = ()
    joined: bool = True
    deviations: Sequence[Point] = ()

    @property
    def colour(self) -> str:
        """What it is drawn in."""
        return COLOURS[self.style.partition(" ")[0]]


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: What it shows, with the unit.
        whole: Whether it has whole numbers alone.
        holds: Values that it reaches to, whatever is drawn.
        log: Whether equal ratios are equal distances.
        falling: Whether small numbers are at the end, where they are the better ones.
        limits: Beyond which there are no values.
    """

    label: str
    whole: bool = False
    holds: Sequence[float] = ()
    log: bool = False
    falling: bool = False
    limits: Point | None = None


@dataclass(frozen=True)
class Chart:
    """Curves, or sets of labelled points, between two axes.

    Attributes:
        title: What it shows, for those who cannot see it.
        curves: What is drawn.
        x: The axis below.
        y: The axis on the left.
        chosen: A point that gets a ring.
    """

    title: str
    curves: Sequence[Curve]
    x: Axis
    y: Axis
    chosen: Point | None = None


def to_svg(chart: Chart) -> Markup:
    """Draw a chart for the page, in the page's own colours, so that it follows dark mode and print."""
    with _styled(14, salt=repr(chart)):
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), dpi=72)
        figure.patch.set_visible(False)
        axes = figure.subplots()
        _draw(axes, chart)
        axes.set_ylabel("")
        figure.text(2 / _WIDTH, 1 - 16 / _HEIGHT, chart.y.label)
        _place(axes, top=48 if chart.curves[0].labels else 34)
        _label(figure, axes, chart)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=FORMATS["svg"])
    drawn = file.getvalue()
    drawn = drawn[drawn.index('<g id="figure') :]
    for name, colour in COLOURS.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    for pattern, instead in _CLEANED:
        drawn = re.sub(pattern, instead, drawn)
    title, box = escape(chart.title), f"0 0 {_WIDTH} {_HEIGHT}"
    return Markup(  # noqa: S704 - matplotlib has escaped every text in it
        f'<svg class="chart" role="img" aria-label="{title}" viewBox="{box}"><title>{title}</title>{drawn}'
    )


def draw_charts(path: Path, charts: Sequence[Chart], title: str) -> None:
    """Draw charts beside each other; see `figure_of`.

    Args:
        path: The file to write, in the format that it ends in.
        charts: What is drawn.
        title: One line above them.
    """
    with _styled(10, salt=title):
        save_figure(path, figure_of(charts, title))


def figure_of(charts: Sequence[Chart], title: str) -> Figure:
    """Return charts beside each other, with one line above them; a notebook shows it, `savefig` writes it."""
    with _styled(10, salt=title):
        count = max(len(charts), 1)
        figure = Figure(figsize=(6 * count + 1, 4.8), layout="constrained")
        figure.suptitle(title, color=COLOURS["ink"])
        for chart, axes in zip(charts, figure.subplots(1, count, squeeze=False).flat, strict=False):
            _draw(axes, chart)
            shown = [
                Line2D([], [], color=curve.colour, marker="o" if curve.labels else "", **_look(curve))
                for curve in chart.curves
            ]
            axes.legend(shown, [curve.name for curve in chart.curves], loc="lower left", bbox_to_anchor=(0, 1.04))
            _label(figure, axes, chart)
    return figure


def draw_importance(path: Path, layers: Sequence[Mapping[str, Any]], title: str, *, overwrite: bool = True) -> None:
    """Draw a bar for each layer's share of the curvature, first layer on top.

    Args:
        path: The file to write, in the format that it ends in.
        layers: The `layer` and `share` of each.
        title: One line above the figure.
        overwrite: Whether a file that is there may be replaced.
    """
    with _styled(8, salt=title):
        figure = Figure(figsize=(7, 1.2 + 0.28 * len(layers)), layout="constrained")
        axes = figure.subplots()
        shares = [100 * layer["share"] for layer in layers]
        axes.bar_label(axes.barh(range(len(layers)), shares, color=COLOURS["k0"]), fmt="%.1f", padding=3)
        axes.set_yticks(range(len(layers)), [layer["layer"] for layer in layers])
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set(xlabel="% of the trace", title=title, xlim=(0, 1.12 * max(shares, default=1.0)))
        save_figure(path, figure, overwrite=overwrite)


def figure_format(path: Path) -> str:
    """Return the format that a figure's file has by its name.

    Raises:
        UsageError: if it is none of `FORMATS`.
    """
    ending = path.suffix[1:].lower()
    if ending not in FORMATS:
        raise UsageError(f"the figure {path} should end in .{', .'.join(FORMATS)}")
    return ending


def save_figure(path: Path, figure: Figure, *, overwrite: bool = True) -> None:
    """Write a figure in the format that its name ends in."""
    with atomic_write(path, overwrite=overwrite) as temporary:
        FigureCanvasAgg(figure)
        ending = figure_format(path)
        figure.savefig(temporary, format=ending, dpi=120, metadata=FORMATS[ending])


def _styled(size: float, salt: str) -> AbstractContextManager[None]:
    """Draw as we do, whatever the settings of the program around us; the same chart is then the same bytes."""
    context: AbstractContextManager[None] = style.context(
        {**_STYLE, "font.size": size, "svg.hashsalt": salt}, after_reset=True
    )
    return context


def _draw(axes: Axes, chart: Chart) -> None:
    """Draw lines, their marks where they are few, labelled points, and the ring."""
    for curve in chart.curves:
        x, y = zip(*curve.points, strict=True)
        if curve.joined and len(x) > 1:
            axes.plot(x, y, color=curve.colour, gid="line", clip_on=False, **_look(curve))
        if any(map(any, curve.deviations)):
            across, along = zip(*curve.deviations, strict=True)
            axes.errorbar(x, y, along, across, fmt="none", ecolor=curve.colour, elinewidth=0.8, capsize=2, alpha=0.6)
        hollow = curve.style == "plain"
        marker: dict[str, Any] = {
            "marker": "o", "linestyle": "none", "clip_on": False, "color": COLOURS["page"] if hollow else curve.colour,
            "markeredgecolor": curve.colour if hollow else COLOURS["page"], "markeredgewidth": 1.8 if hollow else 1.2,
        }  # fmt: skip
        if not curve.labels and len(x) <= _MARKED and "beside" not in curve.style:
            axes.plot(x, y, gid="dot", markersize=6.4, **marker)
        for (a, b), label in zip(curve.points, curve.labels, strict=False):
            about = f"dot: {label}: {chart.x.label} {a:.4g}, {chart.y.label} {b:.4g}"
            axes.plot([a], [b], gid=about, markersize=10, **marker)
    if chart.chosen is not None:
        axes.plot(*([value] for value in chart.chosen), "o", gid="ring", clip_on=False, markersize=19,
                  fillstyle="none", markeredgewidth=1.5, color=COLOURS["ink"])  # fmt: skip
    _scale(axes, chart)


def _look(curve: Curve) -> dict[str, Any]:
    if curve.labels:
        return {"linewidth": 1.4, "alpha": 0.55, "linestyle": "-" if curve.joined else "none"}
    if "beside" in curve.style:
        return {"linewidth": 1.6, "linestyle": (0, (2, 5)), "alpha": 0.85}
    return {"linewidth": 2.2, "linestyle": (0, (9, 5)) if "again" in curve.style else "-"}


def _scale(axes: Axes, chart: Chart) -> None:
    """Let both axes hold all that is drawn, with few and round numbers."""
    axes.set(xlabel=chart.x.label, ylabel=chart.y.label)
    axes.grid(visible=True, axis="y", clip_on=False)
    axes.update_datalim([(value, 0) for value in chart.x.holds], updatey=False)
    axes.update_datalim([(0, value) for value in chart.y.holds], updatex=False)
    if any(curve.labels for curve in chart.curves):
        axes.margins(0.06, 0.03, tight=False)
    sides = ("x", axes.xaxis, chart.x), ("y", axes.yaxis, chart.y)
    for name, axis, shown in sides:
        axes.set(**{f"{name}scale": "log" if shown.log else "linear"})
        axis.set_minor_locator(NullLocator())
        round_steps = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=shown.whole)
        axis.set_major_locator(LogLocator(numticks=7) if shown.log else round_steps)
        axis.set_major_formatter(FuncFormatter(_number))
    for name, axis, shown in sides:
        if shown.limits is not None:
            low, high = getattr(axes, f"get_{name}lim")()
            axes.set(**{f"{name}lim": (max(low, shown.limits[0]), min(high, shown.limits[1]))})
        axis.set_inverted(shown.falling)


def _place(axes: Axes, top: float) -> None:
    """Leave room around the axes for the numbers beside them, and take as many of those below as do not touch."""
    beside, below = (_CHARACTER * max(map(len, _texts(axis))) for axis in (axes.yaxis, axes.xaxis))
    left, right, bottom = 12 + beside, max(14, below / 2 + 2), 52
    axes.set_position((left / _WIDTH, bottom / _HEIGHT, 1 - (left + right) / _WIDTH, 1 - (top + bottom) / _HEIGHT))
    ticks, limits = axes.get_xticks(), axes.get_xlim()
    every = math.ceil((below + _CHARACTER) * (len(ticks) - 1) / (_WIDTH - left - right))
    axes.set_xticks(ticks[:: max(1, every)])
    axes.set_xlim(limits)


def _texts(axis: Any) -> list[str]:
    return [_number(value) for value in axis.get_majorticklocs()]


def _label(figure: Figure, axes: Axes, chart: Chart) -> None:
    """Write the label of each point where there is room for it, that of the chosen one first."""
    if not any(curve.labels for curve in chart.curves):
        return
    figure.draw_without_rendering()  # only then is it known where everything lies
    left, bottom, right, top = axes.get_window_extent().extents
    inside = Bbox.from_extents(left, bottom, right, top + 20)
    points = [axes.transData.transform(point) for curve in chart.curves for point in curve.points]
    taken = [Bbox.from_bounds(a - 7, b - 7, 14, 14) for a, b in points]
    lines = [line.get_path().transformed(axes.transData) for line in axes.lines if line.get_gid() == "line"]
    labelled = [pair for curve in chart.curves for pair in zip(curve.points, curve.labels, strict=False)]
    for point, label in sorted(labelled, key=lambda pair: pair[0] != chart.chosen):
        note = axes.annotate(label, point, (0, 0), textcoords="offset points", color=COLOURS["ink"])
        for right, up, ha, va in _BESIDE:
            note.set(position=(right, up), ha=ha, va=va)
            box = note.get_window_extent()
            free = not box.count_overlaps(taken) and not any(line.intersects_bbox(box, filled=False) for line in lines)
            if free and inside.contains(*box.min) and inside.contains(*box.max):
                taken.append(box)
                break
        else:
            note.remove()


def _number(value: float, _position: int | None = None) -> str:
    """Return the number at a tick."""
    size = abs(value)
    if size < 10_000:
        return signed(f"{value:.6g}")
    unit, mark = (1e9, "G") if size >= 1e9 else (1e6, "M") if size >= 1e6 else (1e3, "k")
    return signed(f"{value / unit:.6g}{mark}")
