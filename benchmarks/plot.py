"""Plots `results/quality.jsonl` as `results/quality.svg`: score over all kinds of text against stored parameters."""

import io

from harness import RESULTS, Row, quality_rows
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, StrMethodFormatter

SVG = RESULTS / "quality.svg"


def quality_svg(rows: list[Row]) -> str:
    """The plot of `quality_rows()`, the dense row first: a curve for every method, tier and settings.

    The same rows give the same text.
    """
    dense, *compressed = rows
    curves: dict[str, list[Row]] = {}
    for row in compressed:
        settings = "".join(f", {name} {value}" for name, value in row["settings"].items())
        curves.setdefault(f"{row['recipe']}, {row['tier']}{settings}", []).append(row)
    with rc_context({"svg.hashsalt": "oneshot", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for label, points in curves.items():
            points = sorted(points, key=lambda row: row["stored_parameters"])
            sizes = [row["stored_parameters"] / 1e6 for row in points]
            axes.plot(sizes, [row["score"] for row in points], marker="o", label=label)
        axes.plot(dense["stored_parameters"] / 1e6, 1, marker="*", markersize=12, color="black", ls="", label="dense")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.yaxis.set_minor_formatter(
            LogFormatter(minor_thresholds=(2, 0.5))
        )  # numbers between only in a narrow range
        axes.set_xlabel("stored parameters (millions)")
        axes.set_ylabel("perplexity ÷ dense, geometric mean over kinds of text")
        axes.set_title(f"{dense['model']}: quality against size (lower is better)")
        axes.grid(alpha=0.3)
        axes.legend()
        file = io.StringIO()
        canvas.print_svg(file, metadata={"Date": None, "Creator": None})
    return file.getvalue()


def main() -> None:
    rows = quality_rows()
    if not rows:
        raise SystemExit("results/quality.jsonl has no rows with five kinds of text; run benchmarks/quality.py.")
    SVG.write_text(quality_svg(rows))


if __name__ == "__main__":
    main()
