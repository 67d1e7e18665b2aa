"""The plots of `report.html`, as SVG elements: lines and marks above layers or sizes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from oneshot.report.records import Report, SublayerReport

# Sublayer kind -> name, colour (safe for the colour-blind).
KINDS = {
    "ffn": ("FFN width", "#0072b2"),
    "heads": ("heads", "#d55e00"),
    "experts": ("experts", "#cc79a7"),
    "attention input": ("hidden size at attention", "#009e73"),
    "ffn input": ("hidden size at FFN", "#aa4499"),
}
WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 34, 44  # around the plotted area, in the units of the SVG
MOST_TICKS = 8
STEPS = (1, 2, 2.5, 5, 10)  # of ticks, times a power of ten

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of one name and colour: joined by a line, or as hollow marks. One without a name has no legend."""

    name: str
    colour: str
    points: Sequence[Point]
    marks: bool = False


def sizes_plot(report: Report) -> str:
    """Return the kept share of the dense size by layer; a layer without a report keeps everything."""
    series = []
    for kind, (name, colour) in KINDS.items():
        sublayers = _sublayers(report, kind)
        if kind in ("ffn", "heads") or any(sublayers):
            shares = [one.kept_size / one.dense_size if one else 1.0 for one in sublayers]
            series.append(Series(name, colour, list(enumerate(shares))))
    return draw(series, x="layer", y="kept of the dense size", top=1.05, show_y=".0%")


def errors_plot(report: Report) -> str | None:
    """Return relative errors by layer, predicted as lines and measured as marks; None without errors."""
    series = []
    for kind, (name, colour) in KINDS.items():
        sublayers = list(enumerate(_sublayers(report, kind)))
        predicted = _known((layer, one.predicted_error) for layer, one in sublayers if one)
        measured = _known((layer, one.measured_error) for layer, one in sublayers if one)
        if predicted or measured:
            series += [Series("", colour, predicted), Series(name, colour, measured, marks=True)]
    if not series:
        return None
    return draw(series, x="layer", y="relative error")


def curve_plot(report: Report) -> str | None:
    """Return the predicted loss by removed share of the parameters, with this run marked; None without a profile."""
    curve, reached = report.predicted_curve, report.sparsity["reached"]
    if not curve or not report.predicted_divergence:
        return None
    points = sorted((float(share), value) for share, value in curve.items())
    here = [(reached or 0.0, report.predicted_divergence["plan"])]
    series = [Series("other sizes", "#0072b2", [(0.0, 0.0), *points]), Series("this run", "#d55e00", here, marks=True)]
    return draw(series, x="removed share of the parameters", y="predicted divergence, nats", show_x=".0%")


def draw(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    top: float | None = None,
    show_x: str = "",
    show_y: str = ".2g",
) -> str:
    """Return an SVG element with axes from 0, ticks, a legend and every series.

    Args:
        x, y: labels. top: end of the vertical axis; None: above the largest value.
        show_x, show_y: formats of the ticks; without `show_x` only whole numbers have one.
    """
    points = [point for one in series for point in one.points]
    margin = 0.0 if show_x else 0.5  # half a layer on both sides
    right = max((point[0] for point in points), default=0.0)
    right = right if right + margin else 1.0
    top = top or 1.08 * max((point[1] for point in points), default=0.0) or 1.0

    def at(point: Point) -> Point:
        across = (point[0] + margin) / (right + 2 * margin)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - point[1] / top * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in _ticks(top):
        _, height = at((0, value))
        parts.append(f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="currentColor" opacity=".2"/>')
        parts.append(_text(LEFT - 6, height + 4, format(value, show_y), "end"))
    for value in _ticks(right, whole=not show_x):
        place, _ = at((value, 0))
        parts.append(_text(place, HEIGHT - BOTTOM + 16, format(value, show_x or ".0f"), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(_text(14, middle, y, "middle", f' transform="rotate(-90 14 {middle})"'))
    place = float(LEFT)
    for one in series:
        parts.append(_drawn(one, [at(point) for point in one.points]))
        if one.name:
            parts.append(f'<path d="M{place:.0f} 16h16" stroke="{one.colour}" stroke-width="3"/>')
            parts.append(_text(place + 22, 20, one.name, "start"))
            place += 34 + 6.2 * len(one.name)
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" fill="none" font-size="12">\n{body}\n</svg>'


def _drawn(series: Series, places: Sequence[Point]) -> str:
    if series.marks:
        radius = min(4.0, max(1.5, 130 / max(1, len(places))))
        circles = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>' for x, y in places)
        return f'<g stroke="{series.colour}" stroke-width="1.6">{"".join(circles)}</g>'
    line = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
    return f'<polyline points="{line}" stroke="{series.colour}" stroke-width="1.6"/>'


def _ticks(end: float, *, whole: bool = False) -> list[float]:
    """Return at most `MOST_TICKS` + 1 round numbers from 0 to the end."""
    least = max(end, 1e-300) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(step * power for step in STEPS if step * power >= least)
    if whole:
        step = max(1, math.ceil(step))
    return [number * step for number in range(int(end / step * (1 + 1e-9)) + 1)]


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="currentColor" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _known(points: Iterable[tuple[int, float | None]]) -> list[Point]:
    return [(layer, value) for layer, value in points if value is not None and math.isfinite(value)]


def _sublayers(report: Report, kind: str) -> list[SublayerReport | None]:
    """Return the sublayer of this kind in every layer."""
    return [next((one for one in layer.sublayers if one.kind == kind), None) for layer in report.layers]
