"""`report.html`: a run on one self-contained page with plots."""

import math
import re
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from oneshot.families import RANKED_KINDS
from oneshot.report.layer_table import layer_table
from oneshot.report.records import Report, SublayerReport

# Sublayer kind -> name, colour (safe for the colour-blind), marker.
KINDS = {
    "ffn": ("FFN width", "#0072b2", "o"),
    "heads": ("heads", "#d55e00", "s"),
    "attention input": ("hidden size at attention", "#009e73", "^"),
    "ffn input": ("hidden size at FFN", "#aa4499", "v"),
}


def report_page(report: Report) -> str:
    """Return the report as HTML without scripts and other files. The same report gives the same text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["show"] = _show
    template = resources.files("oneshot.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
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
        plots = {"sizes_plot": _sizes_plot(report), "errors_plot": _errors_plot(report)}
    checkpoint = str(report.config["checkpoint"])
    general = {name: value for name, value in report.config.items() if not isinstance(value, dict)}
    name = Path(checkpoint).name or checkpoint
    headings, rows = layer_table(report)
    ranked = {
        number
        for number, layer in enumerate(report.plan["layers"])
        if any(layer[f"{kind}_rank"] is not None for kind in RANKED_KINDS)
    }
    return environment.from_string(template).render(
        report=report, name=name, general=general, headings=headings, size_rows=rows, ranked=ranked, **plots
    )


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


def _show(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
