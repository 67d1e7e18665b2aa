"""The plots of `report.html`, as SVG. Only this file needs matplotlib."""

import math
import re
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from oneshot.report.records import Report, SublayerReport

# Sublayer kind -> name, colour (safe for the colour-blind), marker.
KINDS = {
    "ffn": ("FFN width", "#0072b2", "o"),
    "heads": ("heads", "#d55e00", "s"),
    "experts": ("experts", "#cc79a7", "D"),
    "attention input": ("hidden size at attention", "#009e73", "^"),
    "ffn input": ("hidden size at FFN", "#aa4499", "v"),
}


def draw_plots(report: Report) -> dict[str, str | None]:
    """Return the plots of a report by name, as SVG elements; None for a plot without anything to draw."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not the user's matplotlibrc
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",  # text stays text
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid": True,
                "grid.color": "#cccccc",
                "grid.linewidth": 0.6,
                "legend.frameon": False,
            }
        )
        return {"sizes_plot": _sizes_plot(report), "errors_plot": _errors_plot(report)}


def _sizes_plot(report: Report) -> str:
    """Plot the kept share of the dense size by layer; a layer without a report keeps everything."""
    figure, axes = _figure(report)
    for kind in KINDS:
        sublayers = _sublayers(report, kind)
        if kind in ("ffn", "heads") or any(sublayers):
            _draw(axes, report, kind, [100 * one.kept_size / one.dense_size if one else 100 for one in sublayers])
    axes.set_ylim(0, 105)
    axes.yaxis.set_major_formatter(PercentFormatter())
    axes.set_ylabel("kept of the dense size")
    return _svg(figure, "sizes")


def _errors_plot(report: Report) -> str | None:
    """Plot relative errors by layer, predicted as lines and measured as markers; None without errors."""
    figure, axes = _figure(report)
    for kind in KINDS:
        sublayers = _sublayers(report, kind)
        predicted = [_drawable(one.predicted_error if one else None) for one in sublayers]
        measured = [_drawable(one.measured_error if one else None) for one in sublayers]
        if not all(math.isnan(error) for error in predicted + measured):
            _draw(axes, report, kind, predicted, marker=".", label="_")
            _draw(axes, report, kind, measured, linestyle="")
    if not axes.lines:
        return None
    axes.set_ylim(0, 1.08 * axes.dataLim.y1 or 1)
    axes.set_ylabel("relative error")
    return _svg(figure, "errors")


def _sublayers(report: Report, kind: str) -> list[SublayerReport | None]:
    """Return the sublayer of this kind in every layer."""
    return [next((one for one in layer.sublayers if one.kind == kind), None) for layer in report.layers]


def _drawable(value: float | None) -> float:
    """Return the value, or NaN, which leaves a gap."""
    return value if value is not None and math.isfinite(value) else math.nan


def _figure(report: Report) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("layer")
    num_layers = len(report.layers)
    axes.set_xlim(-0.6, max(1, num_layers) - 0.4)
    axes.set_xticks(range(0, num_layers, max(1, round(num_layers / 8))))
    return figure, axes


def _draw(axes: Axes, report: Report, kind: str, values: list[float], **options: Any) -> None:
    name, colour, marker = KINDS[kind]
    layers = [layer.layer for layer in report.layers]
    size = min(5.0, max(2.0, 130 / max(1, len(layers))))
    usual: dict[str, Any] = {"label": name, "color": colour, "marker": marker, "markersize": size, "linewidth": 1.2}
    axes.plot(layers, values, fillstyle="none", **usual | options)


def _svg(figure: Figure, salt: str) -> str:
    """Return the figure as an SVG element; `salt` keeps its definitions apart from other figures."""
    text = StringIO()
    figure.legend(loc="outside upper center", ncols=2)
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(
            text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = text.getvalue()
    return re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])
