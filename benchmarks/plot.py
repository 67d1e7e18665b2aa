"""Plots: score against stored parameters beside other tools; widths and errors by depth; quantised files."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

from harness import RESULTS, Row
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, ScalarFormatter
from quality_rows import quality_rows, varies_a_part
from tables.other_tools import default_curves, other_curves
from tables.pareto import by_model, frontier, pareto_rows

QUALITY, LAYERS, PARETO = RESULTS / "quality.svg", RESULTS / "layers.svg", RESULTS / "pareto.svg"
SIZE_COLOURS = {0.0: "0.15", 0.1: "tab:blue", 0.2: "tab:orange", 0.3: "tab:red"}
TYPE_MARKERS = {"F16": "o", "Q8_0": "s", "Q6_K": "D", "Q4_K_M": "^", "Q3_K_M": "v", "Q2_K": "X", "Q4_0-pure": "*"}


@contextmanager
def _drawing(columns: int, file: io.StringIO) -> Iterator[list[Axes]]:
    """Axes beside each other, written to `file` as SVG at the end; the same lines give the same text."""
    with rc_context({"svg.hashsalt": "oneshot", "svg.fonttype": "none"}):
        figure = Figure(figsize=({1: 8, 2: 11, 3: 13}[columns], 5), layout="constrained")
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
        for (tool, points), colour in zip(others.items(), ("0.15", "0.35", "0.5", "0.6", "0.7"), strict=True):
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


def pareto_svg(rows: list[Row]) -> str:
    """Draw the score of every quantised file against its size and its speeds; a thin line joins the best files."""
    columns = {
        "file_bytes": ("file size, MB", 1e-6),
        "prefill_ratio": ("prefill, tokens/s ÷ dense F16's", 1),
        "decode_ratio": ("decoding, tokens/s ÷ dense F16's", 1),
    }
    file = io.StringIO()
    with _drawing(3, file) as panels:
        for axes, (field, (label, unit)) in zip(panels, columns.items(), strict=True):
            for name, files in by_model(rows).items():
                shown = [row for row in files.values() if field in row]
                if not shown:
                    continue
                first = shown[0]
                colour, style = SIZE_COLOURS[first["asked"]], ":" if first["series"] == "stock" else "-"
                places, scores = [row[field] * unit for row in shown], [row["score"] for row in shown]
                axes.plot(places, scores, style, color=colour, label=name)
                for place, row in zip(places, shown, strict=True):
                    axes.plot(place, row["score"], TYPE_MARKERS[row["type"]], color=colour)
            best = list(frontier(rows, field))
            axes.plot(
                [row[field] * unit for row in best], [row["score"] for row in best], color="tab:green", lw=7, alpha=0.25
            )
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(ScalarFormatter())
            axes.set_xlabel(label)
            axes.grid(alpha=0.3, which="both")
        panels[0].set_ylabel("perplexity ÷ dense F16's, geometric mean over five texts")
        panels[0].legend(fontsize="small")
        keys = [panels[1].plot([], [], marker, color="0.5", label=kind)[0] for kind, marker in TYPE_MARKERS.items()]
        keys += panels[1].plot([], [], color="tab:green", lw=7, alpha=0.25, label="no file beats these")
        panels[1].legend(handles=keys, fontsize="x-small", loc="upper left")
        panels[1].set_title(f"{rows[0]['model']} in llama.cpp (lower is better; left: smaller, right: faster)")
    return file.getvalue()


def main() -> None:
    rows = quality_rows()
    if not rows:
        raise SystemExit("results/quality.jsonl has no rows with five kinds of text; run benchmarks/quality.py.")
    QUALITY.write_text(quality_svg(rows[0]))
    LAYERS.write_text(layers_svg(rows))
    if files := pareto_rows():
        PARETO.write_text(pareto_svg(files))


if __name__ == "__main__":
    main()
