"""`report.html`: a run on one self-contained page with plots."""

from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from oneshot.families import RANKED_KINDS
from oneshot.report.layer_table import layer_table
from oneshot.report.records import Report

WITHOUT_PLOTS = "<p>The plots need matplotlib: pip install 'oneshot-llm[plots]'.</p>"


def report_page(report: Report) -> str:
    """Return the report as HTML without scripts and other files. The same report gives the same text."""
    if find_spec("matplotlib") is None:
        plots: dict[str, str | None] = {"sizes_plot": WITHOUT_PLOTS, "errors_plot": WITHOUT_PLOTS}
    else:
        from oneshot.report.plots import draw_plots

        plots = draw_plots(report)
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
        report=report, name=name, general=general, headings=headings, size_rows=rows, ranked=ranked, **plots
    )


@cache
def _template() -> Template:
    """Return the compiled template."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["show"] = _show
    text = resources.files("oneshot.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(text)


def _show(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
