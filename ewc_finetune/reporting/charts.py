"""Line charts, scatter plots and bars as SVG, in the page's own colours, so that they follow dark mode and print.

All text in a figure is numbers and units, so that nothing long is ever to be placed; names stand in the legend, which
is HTML. A figure is drawn at the width that it has on a phone or in two columns, so its text keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from ewc_finetune.reporting.measures import signed

Point = tuple[float, float]

WIDTH, HEIGHT = 420, 290
# Of the widest sans serif's digits, at the 14 px that the page's style gives a figure's text.
_CHARACTER, _TEXT = 9.2, 14
_TOP, _BOTTOM, _RIGHT = 34, 52, 14
MOST_POINTS = 400


@dataclass(frozen=True)
class Curve:
    """One curve, or one set of points.

    Attributes:
        name: For the legend.
        style: Its class in the page's style.
        points: What is drawn, in order of x.
        labels: Of a scatter plot, the text at each point.
        joined: Of a scatter plot, whether a line goes through the points.
    """

    name: str
    style: str
    points: Sequence[Point]
    labels: Sequence[str] = ()
    joined: bool = False


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: What it shows, with the unit.
        low: Its lower end.
        high: Its upper end.
        ticks: Where it has numbers, and these.
        log: Whether equal ratios are equal distances.
        falling: Whether small numbers are at the end, where they are the better ones.
    """

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False
    falling: bool = False

    def share(self, value: float) -> float:
        """Return where a value lies between the ends, 0 to 1."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        share = (at - low) / (high - low)
        return 1 - share if self.falling else share


def linear_axis(
    label: str,
    values: Sequence[float],
    *,
    most: int = 5,
    whole: bool = False,
    zero: bool = False,
    falling: bool = False,
    room: float = 0.0,
    limits: Point = (-math.inf, math.inf),
) -> Axis:
    """Return an axis with round numbers at its ends and between, that holds all values.

    Args:
        label: What it shows, with the unit.
        values: What is to be drawn.
        most: How many steps it may have.
        whole: Whether only whole numbers are round.
        zero: Whether it begins at zero, if nothing is below.
        falling: See `Axis`.
        room: What share of the range is left free at both ends.
        limits: Beyond which there are no values.
    """
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = room * (high - low)
    low, high = max(low - margin, limits[0]), min(high + margin, limits[1])
    low = min(low, 0.0) if zero else low
    if high <= low:
        margin = 1.0 if whole else abs(low) * 0.05 or 1.0
        low, high = low if zero and low >= 0 else low - margin, high + margin
    step = _round_step((high - low) / most, whole)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    places = [float(f"{n * step:.12g}") for n in range(first, max(last, first + 1) + 1)]
    return Axis(label, places[0], places[-1], [(value, _number(value, step)) for value in places], falling=falling)


def log_axis(label: str, values: Sequence[float]) -> Axis:
    """Return an axis of whole decades that holds all values, which are positive."""
    first, last = math.floor(math.log10(min(values)) + 1e-9), math.ceil(math.log10(max(values)) - 1e-9)
    last = max(last, first + 1)
    every = -(-(last - first) // 6)
    ticks = [(10.0**n, f"{10.0**n:g}" if abs(n) < 4 else signed(f"1e{n}")) for n in range(first, last + 1, every)]
    return Axis(label, 10.0**first, 10.0**last, ticks, log=True)


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most `MOST_POINTS` points: of each stretch of a longer curve the lowest and the highest."""
    if len(points) <= MOST_POINTS:
        return list(points)
    kept: list[Point] = []
    buckets = MOST_POINTS // 2
    for n in range(buckets):
        stretch = points[n * len(points) // buckets : (n + 1) * len(points) // buckets]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def line_chart(curves: Sequence[Curve], x: Axis, y: Axis, title: str) -> Markup:
    """Draw curves; with marks at the points where they are few."""
    frame = _Frame(x, y)
    marks = []
    for curve in curves:
        points = [frame.place(point) for point in thinned(curve.points)]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        if len(points) > 1:
            marks.append(f'<path class="line {curve.style}" d="{path}"/>')
        if len(points) <= 20 and "beside" not in curve.style:
            marks += [f'<circle class="dot {curve.style}" cx="{a:.1f}" cy="{b:.1f}" r="3.2"/>' for a, b in points]
    return frame.drawn(title, marks)


def scatter(sets: Sequence[Curve], x: Axis, y: Axis, title: str, chosen: Point | None = None) -> Markup:
    """Draw points with a label at each, as long as there is room for it; `chosen` gets a ring."""
    frame = _Frame(x, y, top=_TOP + _TEXT)  # for labels of what lies at the very top
    marks, places = [], [frame.place(point) for curve in sets for point in curve.points]
    for curve in sets:
        if curve.joined and len(curve.points) > 1:
            path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in map(frame.place, curve.points))
            marks.append(f'<path class="line faint {curve.style}" d="{path}"/>')
    if chosen is not None:
        a, b = frame.place(chosen)
        marks.append(f'<circle class="ring" cx="{a:.1f}" cy="{b:.1f}" r="9.5"/>')
    taken = [(a - 7, b - 7, a + 7, b + 7) for a, b in places]
    taken += [
        (a - 1, b - 1, a + 1, b + 1)
        for curve in sets
        if curve.joined
        for ends in pairwise(map(frame.place, curve.points))
        for a, b in _along(*ends)
    ]
    for curve in sets:
        for point, label in sorted(zip(curve.points, curve.labels, strict=True), key=lambda item: item[0] != chosen):
            a, b = frame.place(point)
            about = escape(f"{label}: {x.label} {point[0]:.4g}, {y.label} {point[1]:.4g}")
            marks.append(
                f'<circle class="dot {curve.style}" cx="{a:.1f}" cy="{b:.1f}" r="5"><title>{about}</title></circle>'
            )
            box = _room_for(label, a, b, taken, frame)
            if box is not None:
                taken.append(box)
                marks.append(f'<text class="label" x="{box[0] + 2:.1f}" y="{box[3] - 5:.1f}">{escape(label)}</text>')
    return frame.drawn(title, marks)


def bar(share: float | None, style: str) -> Markup:
    """Draw one bar of a table, which has its number beside it."""
    length = 100 * min(max(share or 0.0, 0.0), 1.0)
    return Markup(  # noqa: S704 - numbers, and a class of ours
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="10"/>'
        f'<rect class="fill {style}" width="{length:.2f}" height="10"/></svg>'
    )


class _Frame:
    """The axes of a figure, and where a point comes to lie between them."""

    def __init__(self, x: Axis, y: Axis, top: float = _TOP) -> None:
        self.x, self.y, self.top = x, y, top
        self.left = 12 + _CHARACTER * max(len(text) for _, text in y.ticks)
        self.width, self.height = WIDTH - _RIGHT - self.left, HEIGHT - top - _BOTTOM

    def place(self, point: Point) -> Point:
        return self.left + self.x.share(point[0]) * self.width, self.top + (1 - self.y.share(point[1])) * self.height

    def drawn(self, title: str, marks: Sequence[str]) -> Markup:
        floor = self.top + self.height
        parts = [f"<title>{escape(title)}</title>", f'<text class="unit" x="2" y="16">{escape(self.y.label)}</text>']
        for value, text in self.y.ticks:
            at = self.top + (1 - self.y.share(value)) * self.height
            parts.append(f'<path class="grid" d="M{self.left:.1f} {at:.1f}H{WIDTH - _RIGHT}"/>')
            parts.append(f'<text class="tick" x="{self.left - 7:.1f}" y="{at + 5:.1f}" text-anchor="end">{text}</text>')
        for value, text in self._apart():
            at = self.left + self.x.share(value) * self.width
            half = _CHARACTER * len(text) / 2
            middle = min(at, WIDTH - half - 1)
            parts.append(f'<path class="axis" d="M{at:.1f} {floor}v5"/>')
            parts.append(f'<text class="tick" x="{middle:.1f}" y="{floor + 20}" text-anchor="middle">{text}</text>')
        parts.append(f'<path class="axis" d="M{self.left:.1f} {floor}H{WIDTH - _RIGHT}"/>')
        centre = self.left + self.width / 2
        parts.append(
            f'<text class="unit" x="{centre:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.x.label)}</text>'
        )
        return Markup(  # noqa: S704 - every text in it was escaped where it was put in
            f'<svg class="chart" role="img" aria-label="{escape(title)}" viewBox="0 0 {WIDTH} {HEIGHT}">'
            f"{''.join(parts)}<g>{''.join(marks)}</g></svg>"
        )

    def _apart(self) -> list[tuple[float, str]]:
        """Return the ticks below, every so many of them, so that their numbers stay apart."""
        widest = _CHARACTER * (max(len(text) for _, text in self.x.ticks) + 1)
        every = max(1, math.ceil(widest * (len(self.x.ticks) - 1) / self.width))
        return list(self.x.ticks[::every])


def _room_for(
    label: str, a: float, b: float, taken: Sequence[tuple[float, ...]], frame: _Frame
) -> tuple[float, float, float, float] | None:
    """Return where a label fits beside its point without touching another or a point: left, top, right, bottom."""
    width, height = _CHARACTER * len(label) + 4, _TEXT + 6
    right, above, below = a + 10, b - 8 - height, b + 8
    corners = [
        (a + 5, above), (right, b - height / 2), (a - width / 2, b - 9 - height), (a - 5 - width, above),
        (a - 10 - width, b - height / 2), (a + 5, below), (a - width / 2, b + 9), (a - 5 - width, below),
    ]  # fmt: skip
    for left, top in corners:
        box = (left, top, left + width, top + height)
        inside = box[0] >= frame.left and box[2] <= WIDTH and box[1] >= _TOP - 12 and box[3] <= HEIGHT - _BOTTOM
        if inside and not any(_touch(box, other) for other in taken):
            return box
    return None


def _along(start: Point, end: Point) -> list[Point]:
    """Return points along a line, close enough that no label slips between."""
    count = 1 + int(math.dist(start, end) / 6)
    return [
        (start[0] + (end[0] - start[0]) * n / count, start[1] + (end[1] - start[1]) * n / count) for n in range(count)
    ]


def _touch(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _round_step(least: float, whole: bool) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))
    return max(1.0, math.ceil(step) if step < 10 else step) if whole else step


def _number(value: float, step: float) -> str:
    if abs(value) < step * 1e-6:
        return "0"
    if abs(value) >= 10_000:
        unit, mark = (1e9, "G") if abs(value) >= 1e9 else (1e6, "M") if abs(value) >= 1e6 else (1e3, "k")
        return signed(f"{value / unit:.6g}{mark}")
    return signed(f"{value:.6g}" if step >= 1e-6 else f"{value:.2e}")
