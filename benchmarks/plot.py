"""Plots of `results/quality.jsonl`: score against stored parameters; kept widths and errors by depth."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

from harness import RESULTS, Row, quality_rows, varies_a_part
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

WORST_DRAWN = 5  # scores beyond stand in the legend, or the others would lie on one line
QUALITY, LAYERS = RESULTS / "quality.svg", RESULTS / "layers.svg"


@contextmanager
def _drawing(columns: int, file: io.StringIO) -> Iterator[list[Axes]]:
    """Axes beside each other, written to `file` as SVG at the end; the same lines give the same text."""
    with rc_context({"svg.hashsalt": "oneshot", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8 if columns == 1 else 11, 5), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        yield list(figure.subplots(1, columns, squeeze=False)[0])
        canvas.print_svg(file, metadata={"Date": None, "Creator": None})


def _label(row: Row) -> str:
    text = ", with text of its own" if "+self" in row["calibration"] else ""
    steps = row["settings"].get("up_steps")
    return f"{row['recipe']}, {row['tier']}{text}" + (f", --up-steps {steps}" if steps else "")


def quality_svg(rows: list[Row]) -> str:
    """The plot of `quality_rows()`, the dense row first: a curve for every method, tier and usual text."""
    dense, *compressed = rows
    curves: dict[str, list[Row]] = {}
    for row in compressed:
        if not varies_a_part(row):
            curves.setdefault(_label(row), []).append(row)
    file = io.StringIO()
    with _drawing(1, file) as (axes,):
        for label, points in curves.items():
            shown = sorted(
                (row for row in points if row["score"] <= WORST_DRAWN), key=lambda row: row["stored_parameters"]
            )
            beyond = "".join(f" ({row['score']:,.0f}, beyond)" for row in points if row["score"] > WORST_DRAWN)
            sizes = [row["stored_parameters"] / 1e6 for row in shown]
            axes.plot(sizes, [row["score"] for row in shown], marker="o", label=label + beyond)
        axes.plot(dense["stored_parameters"] / 1e6, 1, marker="*", markersize=12, color="black", ls="", label="dense")
        axes.set_xlabel("stored parameters (millions)")
        axes.set_ylabel("perplexity ÷ dense, geometric mean over kinds of text")
        axes.set_title(f"{dense['model']}: quality against size (lower is better)")
        axes.grid(alpha=0.3)
        axes.legend()
    return file.getvalue()


def layers_svg(rows: list[Row]) -> str:
    """Kept FFN widths and measured FFN errors by layer, of the default recipe's rows in `quality_rows()`."""
    shown = [row for row in rows[1:] if row["recipe"] == "oneshot" and not row["settings"] and not varies_a_part(row)]
    shown = [row for row in shown if row["calibration"] == shown[0]["calibration"]]
    file = io.StringIO()
    with _drawing(2, file) as (widths, errors):
        for row in sorted(shown, key=lambda row: (row["tier"], row["asked"])):
            style = "-" if row["tier"] == "per-layer" else ":"
            label = f"{row['tier']}, −{row['sparsity']:.1%}"
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
    QUALITY.write_text(quality_svg(rows))
    LAYERS.write_text(layers_svg(rows))


if __name__ == "__main__":
    main()
