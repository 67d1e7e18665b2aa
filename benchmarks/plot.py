"""Plots: score against stored parameters beside other tools; kept widths and errors by depth."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

from harness import RESULTS, Row, quality_rows, varies_a_part
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from tables.other_tools import default_curves, other_curves

QUALITY, LAYERS = RESULTS / "quality.svg", RESULTS / "layers.svg"


@contextmanager
def _drawing(columns: int, file: io.StringIO) -> Iterator[list[Axes]]:
    """Axes beside each other, written to `file` as SVG at the end; the same lines give the same text."""
    with rc_context({"svg.hashsalt": "oneshot", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8 if columns == 1 else 11, 5), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        yield list(figure.subplots(1, columns, squeeze=False)[0])
        canvas.print_svg(file, metadata={"Date": None, "Creator": None})


def quality_svg(dense: Row) -> str:
    """Draw the README's table: the default on five texts, and other tools beside it on two texts (dashed)."""
    file = io.StringIO()
    with _drawing(1, file) as (axes,):
        for (form, rows), colour in zip(default_curves().items(), ("tab:blue", "tab:cyan"), strict=True):
            points = {0.0: 1.0} | {row["sparsity"]: row["score"] for row in rows}
            label = f"oneshot, {form} form"
            axes.plot(list(points), list(points.values()), marker="o", linewidth=2.5, color=colour, label=label)
        others = {tool: {0.0: 1.0} | scores for tool, scores in other_curves().items()}
        own = others.pop("oneshot")
        axes.plot(
            list(own), list(own.values()), "--", marker="s", color="tab:blue", label="oneshot, per-layer, two texts"
        )
        for (tool, points), colour in zip(others.items(), ("0.15", "0.4", "0.55", "0.7"), strict=True):
            axes.plot(list(points), list(points.values()), "--", marker="s", color=colour, label=f"{tool}, two texts")
        axes.set_xlabel("stored parameters removed")
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_ylabel("perplexity ÷ dense, geometric mean over texts")
        axes.set_title(f"{dense['model']}: loss of quality by size (lower is better)")
        axes.grid(alpha=0.3)
        axes.legend()
    return file.getvalue()


def layers_svg(rows: list[Row]) -> str:
    """Kept FFN widths and measured FFN errors by layer, of the default recipe's rows in `quality_rows()`."""
    shown = [row for row in rows[1:] if row["recipe"] == "oneshot" and not row["settings"] and not varies_a_part(row)]
    shown = [row for row in shown if row["calibration"] == shown[0]["calibration"]]
    file = io.StringIO()
    with _drawing(2, file) as (widths, errors):
        for row in sorted(shown, key=lambda row: (row["form"], row["asked"])):
            style = "-" if row["form"] == "per-layer" else ":"
            label = f"{row['form']}, −{row['sparsity']:.1%}"
            widths.plot([layer["intermediate_size"] for layer in row["layers"]], style, label=label)
            errors.plot([layer.get("ffn") for layer in row["errors"]], style, label=label)
        widths.set_ylabel("kept FFN neurons")
        errors.set_ylabel("measured error of the FFN's output, relative")
        errors.yaxis.set_major_formatter(PercentFormatter(1))
        for axes in (widths, errors):
            axes.set_xlabel("layer")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        if shown:
            widths.legend()
    return file.getvalue()


def main() -> None:
    rows = quality_rows()
    if not rows:
        raise SystemExit("results/quality.jsonl has no rows with five kinds of text; run benchmarks/quality.py.")
    QUALITY.write_text(quality_svg(rows[0]))
    LAYERS.write_text(layers_svg(rows))


if __name__ == "__main__":
    main()
