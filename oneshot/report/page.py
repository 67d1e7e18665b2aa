"""`report.html`: a run on one self-contained page with plots."""

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from oneshot.architecture import RANKED_KINDS
from oneshot.report.layer_table import layer_table
from oneshot.report.mixture import COLUMNS, mixture_rows
from oneshot.report.plots import curve_plot, errors_plot, sizes_plot
from oneshot.report.records import LayerReport, Report
from oneshot.report.words import NOTHING, by_kind, duration, show, verdict


def report_page(report: Report) -> str:
    """Return the report as HTML without scripts and other files. The same report gives the same text."""
    checkpoint = str(report.config["checkpoint"])
    general = {name: value for name, value in report.config.items() if not isinstance(value, dict)}
    name = Path(checkpoint).name or checkpoint
    headings, rows = layer_table(report)
    ranked = {
        number
        for number, layer in enumerate(report.plan["layers"])
        if any(layer[f"{kind}_rank"] is not None for kind in RANKED_KINDS)
    }
    return _template().render(
        report=report,
        name=name,
        general=general,
        headings=headings,
        size_rows=rows,
        groups=_grouped(report, ranked),
        warnings=report.all_warnings,
        nothing=NOTHING,
        plan={name: value for name, value in report.plan.items() if name != "layers"},
        sizes_plot=sizes_plot(report),
        errors_plot=errors_plot(report),
        curve_plot=curve_plot(report),
        mixture_columns=COLUMNS,
        mixture_rows=[] if report.mixture is None else mixture_rows(report.mixture),
    )


def _grouped(report: Report, ranked: set[int]) -> list[tuple[str, list[LayerReport], str]]:
    """Return the layers with a name and a remark; neighbours without any reduced sublayer are one group."""
    groups: list[tuple[list[LayerReport], str]] = []
    for layer in report.layers:
        remark = "linears of low rank, see below" if layer.layer in ranked else "as it was"
        if not layer.sublayers and groups and not groups[-1][0][-1].sublayers and groups[-1][1] == remark:
            groups[-1][0].append(layer)
        else:
            groups.append(([layer], remark))
    return [(_span(layers), layers, remark) for layers, remark in groups]


def _span(layers: list[LayerReport]) -> str:
    first, last = layers[0].layer, layers[-1].layer
    return str(first) if first == last else f"{first}–{last}"


@cache
def _template() -> Template:
    """Return the compiled template."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"show": show, "duration": duration, "verdict": verdict}
    environment.filters |= {"by_kind": by_kind, "words": _words}
    text = resources.files("oneshot.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(text)


def _words(value: Any) -> str:
    """Return a setting for people: no braces, no quotes, and a dash for what is not set."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items()) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value)) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)
