"""Renders the tables of the documents, and the plot, from the rows in `results/`; `--check` fails where they differ."""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from statistics import fmean

from harness import KINDS, ROOT, Row, fitted_exponent, latest, quality_rows, read_rows, varies_a_part
from plot import LAYERS, QUALITY, layers_svg, quality_svg

KERNELS = ROOT / "kernels" / "oneshot_kernels"
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "docs" / "reliability.md",
    ROOT / "docs" / "recipes" / "group-pca.md",
    ROOT / "docs" / "recipes" / "oneshot.md",
    KERNELS / "pivoted_qr" / "README.md",
    KERNELS / "count_sketch" / "README.md",
)

TEXTS = ("wikitext2", "lambada")  # of the tables that have two


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], caption: str) -> str:
    """A table and a line below it that says what the rows have in common."""
    body = [header, ["---"] * len(header), *lines]
    return "\n".join([*("| " + " | ".join(cells) + " |" for cells in body), "", caption])


def quality_table() -> str:
    """Score, worst kind of text, ratios and task accuracies of every model, over five kinds of text."""
    rows = quality_rows()
    if not rows:
        return "No rows yet: run `python benchmarks/quality.py`."
    dense, *compressed = rows
    compressed = [row for row in compressed if not varies_a_part(row)]
    lines = [[f"0 ({dense['stored_parameters'] / 1e6:.1f} M)", "dense", "–", "–", "1", "–", *["1"] * len(KINDS)]]
    lines[0].append(_accuracy(dense, dense))
    for row in sorted(compressed, key=lambda row: (row["asked"], row["score"])):
        ratios = {kind: row["perplexity"][kind] / dense["perplexity"][kind] for kind in KINDS}
        lines.append(
            [
                f"{row['sparsity']:.1%}",
                f"**{row['recipe']}**" if row["recipe"] == "oneshot" else row["recipe"],
                row["tier"],
                _calibrated(row, compressed),
                _round(row["score"]),
                KINDS[row["worst"]],
                *(_round(ratio) for ratio in ratios.values()),
                _accuracy(row, dense),
            ]
        )
    tasks = dense.get("tasks", {})
    dense_values = ", ".join(f"{dense['perplexity'][kind]:.2f}" for kind in KINDS)
    accuracies = ""
    if tasks:
        documents = f"the first {dense['task_limit']} documents of {', '.join(tasks)}"
        accuracies = f" Accuracy (by length-normalised likelihood where the task has that): mean over {documents}."
    return markdown(
        [
            *("stored removed", "method", "tier", "settings", "score", "worst kind"),
            *(f"{text} ({kind})" for text, kind in KINDS.items()),
            "mean accuracy",
        ],
        lines,
        f"Perplexity ÷ dense for every kind of text (dense: {dense_values}); score: their geometric mean.{accuracies} "
        f"{dense['model']}, fp32, first {dense['max_windows']} windows of {dense['sequence_length']} tokens of each "
        f"text; {_origin([dense, *compressed])}.",
    )


def parts_table() -> str:
    """Scores of the default with one part or its text changed, beside the default at the same size and tier."""
    rows = [row for row in quality_rows() if row["recipe"] == "oneshot"]
    varied = [row for row in rows if varies_a_part(row) or row["calibration"] != rows[0]["calibration"]]
    if not varied:
        return "Not measured yet."
    sizes = {(row["asked"], row["tier"]) for row in varied}
    shown = [row for row in rows if (row["asked"], row["tier"]) in sizes]
    lines = [
        [
            *(f"{row['sparsity']:.1%}", row["tier"], _settings(row) or "–", row["calibration"]),
            *(
                f"{row['calibration_tokens']:,}",
                f"{row['score']:.3f}",
                f"{row['worst_ratio']:.2f} ({KINDS[row['worst']]})",
            ),
        ]
        for row in sorted(shown, key=lambda row: (row["asked"], row["tier"], row["score"]))
    ]
    return markdown(
        ["stored removed", "tier", "settings", "text", "tokens", "score", "worst kind"],
        lines,
        f"Score: geometric mean over five kinds of text of perplexity ÷ dense; {rows[0]['model']}, fp32, first "
        f"{rows[0]['max_windows']} windows of each text; {_origin(shown)}.",
    )


def _calibrated(row: Row, rows: list[Row]) -> str:
    """Settings of a row, and its calibration where it is not that of all rows."""
    texts = {(other["calibration"], other["calibration_tokens"]) for other in rows if other["calibration_tokens"]}
    parts = [_settings(row)] if row["settings"] else []
    if len(texts) > 1 and row["calibration_tokens"]:
        parts.append(f"{row['calibration']}, {row['calibration_tokens']:,} tokens")
    return "; ".join(parts) or "–"


def _accuracy(row: Row, dense: Row) -> str:
    """Mean accuracy where it is over the same documents as the dense model's."""
    known = row.get("tasks") and list(row["tasks"]) == list(dense.get("tasks", ()))
    return f"{row['mean_accuracy']:.1%}" if known and row["task_limit"] == dense["task_limit"] else "–"


def overhead_table() -> str:
    rows = latest([{"tier": "stock"} | row for row in read_rows("overhead")], "recipe", "tier")
    lines = []
    for row in rows:
        seconds = [f"{fmean(row[name]):.0f} s" for name in ("forward_seconds", "whole_forward_seconds")]
        ratios = [f"{row[name]:.2f}" for name in ("ratio", "whole_ratio")]
        total, profile = row["compress_seconds"]["total"], row["compress_seconds"].get("profile")
        taken = f"{total:.0f} s" if profile is None else f"{total:.0f} s ({profile:.0f} s of it the profile)"
        lines.append([row["recipe"], row["tier"], f"{row['num_tokens']:,}", *seconds, taken, *ratios, _operators(row)])
    return markdown(
        [
            *("recipe", "tier", "tokens", "dense pass, no head", "dense pass"),
            *("compression", "÷ pass, no head", "÷ pass", "costliest operators"),
        ],
        lines,
        f"{rows[0]['model']}, {_origin(rows)}.",
    )


def _operators(row: Row) -> str:
    """The four operators that took longest, where the row has been to the profiler."""
    if row["operator_seconds"] is None:
        return "–"
    total = sum(row["operator_seconds"].values())
    first = list(row["operator_seconds"].items())[:4]
    return ", ".join(f"`{name.removeprefix('aten::')}` {seconds / total:.0%}" for name, seconds in first)


def memory_table() -> str:
    """Peak memory by model: predicted, allowed and measured."""
    rows = [row for row in read_rows("memory") if "predicted_bytes" in row]
    if not rows:
        return "Not measured yet."
    rows = sorted(latest(rows, "model", "recipe"), key=lambda row: row["measured_bytes"])
    sizes = ("weight_bytes", "predicted_bytes", "max_memory_bytes", "measured_bytes")
    return markdown(
        [
            "model",
            "tokens",
            "weights",
            "predicted peak",
            "`--max-memory`",
            "measured peak",
            "÷ predicted",
            "activations",
        ],
        [
            [
                row["model"],
                f"{row['num_tokens']:,}",
                *(f"{row[size] / 1e9:.2f} GB" for size in sizes),
                f"{row['ratio']:.2f}",
                f"on the {row['tier']}",
            ]
            for row in rows
        ],
        f"Recipe {rows[0]['recipe']}, resident memory of the whole process, libraries included (0.46 GB before the "
        f"first tensor); {_origin(rows)}.",
    )


def faults_table() -> str:
    """Faults injected, survived and lost."""
    rows = latest(read_rows("faults"), "fault")
    lines = [[row["fault"], *(str(row[name]) for name in ("injected", "survived", "lost"))] for row in rows]
    total = [f"**{sum(row[name] for row in rows)}**" for name in ("injected", "survived", "lost")]
    return markdown(
        ["fault", "injected", "survived", "lost"],
        [*lines, ["**all**", *total]],
        f"{rows[0]['model']}, {rows[0]['num_tokens']:,} tokens; an undisturbed run took "
        f"{rows[0]['undisturbed_seconds']:.0f} s; {_origin(rows)}.",
    )


def processes_table() -> str:
    """Two processes beside one."""
    row = read_rows("processes")[-1]
    return markdown(
        ["one process", "two processes", "same plan", "largest difference of a tensor ÷ its norm"],
        [
            [
                f"{row['one_seconds']:.0f} s",
                f"{row['two_seconds']:.0f} s",
                "yes" if row["same_plan"] else "no",
                f"{row['largest_difference']:.1e}",
            ]
        ],
        f"{row['model']}, {row['num_tokens']:,} tokens, from start to end of the command; {_origin([row])}.",
    )


def sketch_table() -> str:
    rows = latest(read_rows("sketch_quality"), "pivoting", "sketch", "sketch_rows_per_column")
    exact = next(row for row in rows if (row["pivoting"], row["sketch"]) == ("cholesky", "none"))["perplexity"]
    lines = []
    for row in rows:
        times = row["sketch_rows_per_column"]
        source = "exact Gram" if row["sketch"] == "none" else f"{row['sketch']} sketch, {times} n rows"
        cells = [(f"{row['perplexity'][text]:.2f}", f"{row['perplexity'][text] / exact[text]:.3f}") for text in TEXTS]
        lines.append([source, row["pivoting"], *(cell for pair in cells for cell in pair)])
    return markdown(
        ["pivots from", "pivoting", "WikiText-2", "÷ exact", "LAMBADA text", "÷ exact"],
        lines,
        f"{rows[0]['model']} at FFN width 1024 (−19.7 %), {rows[0]['calibration_tokens']:,} dense-stream tokens, "
        f"first {rows[0]['max_windows']} windows; {_origin(rows)}.",
    )


def kernels_table() -> str:
    """Median seconds by operation and size, with the exponent of the fit seconds = c n^p."""
    rows = latest(read_rows("kernels"), "operation", "columns")
    sizes = sorted({row["columns"] for row in rows})
    seconds: dict[str, dict[int, float]] = {}
    for row in rows:
        seconds.setdefault(row["operation"], {})[row["columns"]] = row["median_seconds"]
    lines = []
    for name, measured in seconds.items():
        cells = [f"{measured[size]:.3g}" if size in measured else "–" for size in sizes]
        exponent = fitted_exponent(measured)
        lines.append([name, *cells, "–" if exponent is None else f"{exponent:.2f}"])
    return markdown(["seconds at n =", *map(str, sizes), "exponent"], lines, f"Matrices of 4 n rows, {_origin(rows)}.")


def pivots_table() -> str:
    """Pivots from a sketch and from the exact Gram beside SciPy's, at the sizes where all three were measured."""
    rows = latest(read_rows("kernels"), "operation", "columns")
    seconds = {(row["operation"], row["columns"]): row["median_seconds"] for row in rows}
    lines = []
    for size in sorted(size for operation, size in seconds if operation == "geqp3"):
        scipy = seconds["geqp3", size]
        ours = [seconds[f"pivots, {source}", size] for source in ("fp64 Gram", "sketched")]
        lines.append([str(size), f"{scipy:.3g} s", *(f"{value:.3g} s ({scipy / value:.1f} ×)" for value in ours)])
    return markdown(
        ["n", "SciPy `geqp3`", "ours, exact Gram", "ours, sketched"],
        lines,
        f"Column pivots of a 4 n × n matrix in fp64, Gram and sketch included; {_origin(rows)}.",
    )


def pivot_quality_table() -> str:
    """Excess of ‖R22‖ over geqp3's, and max|T|, by input and method."""
    rows = latest(read_rows("pivot_quality"), "input", "method")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    inputs = list(dict.fromkeys(row["input"] for row in rows))
    found = {(row["input"], row["method"]): row for row in rows}
    cells = [[_excess(found.get((source, method))) for source in inputs] for method in methods]
    return markdown(
        ["excess of ‖R22‖ over geqp3's; max\\|T\\|", *inputs],
        [[method, *line] for method, line in zip(methods, cells, strict=True)],
        f"k = n/2, {_origin(rows)}. “–”: geqp3's error is itself rounding.",
    )


def _excess(row: Row | None) -> str:
    if row is None:
        return "–"
    rounding = row["excess"] is None or not math.isfinite(row["excess"]) or row["relative_error"] < 1e-12
    excess = "–" if rounding else f"{row['excess']:+.2%}" if row["excess"] < 1 else f"× {1 + row['excess']:.3g}"
    return f"{excess}; {row['max_interpolation']:.3g}"


def _scores(row: Row, dense: dict[str, float]) -> list[str]:
    """Perplexity and its ratio to the dense model's, for every text that models are judged on."""
    pairs = [(row["perplexity"][text], row["perplexity"][text] / dense[text]) for text in TEXTS]
    return [_round(value) for pair in pairs for value in pair]


def _settings(row: Row) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row["settings"].items())


def _group(row: Row) -> str:
    return str(row["group_size"] or "one for all")


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def _origin(rows: list[Row]) -> str:
    """Machines, threads and commits of the rows."""
    machines = ", ".join(sorted({row["device"] for row in rows}))
    threads = ", ".join(sorted({str(row["threads"]) for row in rows}))
    commits = ", ".join(sorted({row["commit"] + ("+" if row["dirty"] else "") for row in rows}))
    return f"{machines}, {threads} threads; commits {commits}"


def hidden_size_table() -> str:
    """Perplexity against stored and block parameters by group size, correction and further settings."""
    rows = latest(read_rows("hidden_size"), "group_size", "correction", "settings", "hidden_size")
    dense = next(row["perplexity"] for row in rows if row["group_size"] is None)
    lines = [["dense", "–", "–", "0", "0", *(cell for text in TEXTS for cell in (f"{dense[text]:.2f}", "1"))]]
    rows = [row for row in rows if row["group_size"] is not None]
    for row in sorted(rows, key=lambda row: (row["correction"], len(row["settings"]), row["group_size"])):
        removed = (
            1 - row["stored_parameters"] / row["dense_parameters"],
            1 - row["block_parameters"] / row["dense_block_parameters"],
        )
        shares = [f"{share:.1%}" for share in removed]
        lines.append([_group(row), row["correction"], _settings(row) or "–", *shares, *_scores(row, dense)])
    return markdown(
        [
            *("blocks in a group", "correction", "further settings", "stored removed", "block removed"),
            *("WikiText-2", "× dense", "LAMBADA text", "× dense"),
        ],
        lines,
        f"{rows[0]['model']}, every group {rows[0]['hidden_size']} of 576 wide, general.jsonl, "
        f"{rows[0]['calibration_tokens'] // 1024} × 1024 tokens; first {rows[0]['max_windows']} windows; "
        f"{_origin(rows)}.",
    )


def hidden_error_table() -> str:
    """What the subspaces leave out of the inputs of attention, predicted and measured, by depth."""
    rows = [row for row in read_rows("hidden_size") if row.get("measured_error") and row["measured_error"][0]]
    rows = latest(rows, "group_size")
    if not rows:
        return "Not measured yet."
    depth = len(rows[0]["measured_error"]) // 2
    layers = [*range(0, depth, 5), depth - 1]
    lines = []
    for row in sorted(rows, key=lambda row: row["group_size"]):
        pairs = [(row["predicted_error"][2 * layer], row["measured_error"][2 * layer]) for layer in layers]
        lines.append([_group(row), *(f"{predicted:.3f} / {measured:.3f}" for predicted, measured in pairs)])
    return markdown(
        ["blocks in a group", *(f"layer {layer}" for layer in layers)],
        lines,
        "Relative error of attention's input, predicted from the statistics / measured on the last batch of the "
        f"calibration text; {_origin(rows)}.",
    )


def combined_table() -> str:
    """The hidden size beside FFN and heads in one run, and these alone, at equal stored parameters."""
    rows = [row for row in read_rows("quality") if row["max_windows"] == 4 and row.get("settings")]
    rows = latest([row for row in rows if set(row["perplexity"]) == set(TEXTS)], "settings")
    if not rows:
        return "Not measured yet."
    dense = next(row["perplexity"] for row in read_rows("hidden_size") if row["group_size"] is None)
    lines = []
    for row in sorted(rows, key=lambda row: row["perplexity"]["wikitext2"]):
        lines.append([_settings(row), f"{row['sparsity']:.1%}", *_scores(row, dense)])
    return markdown(
        ["`oneshot` with", "stored removed", "WikiText-2", "× dense", "LAMBADA text", "× dense"],
        lines,
        f"{rows[0]['model']}, {rows[0]['calibration']}, {rows[0]['calibration_tokens'] // 1024} × 1024 tokens; first "
        f"{rows[0]['max_windows']} windows; {_origin(rows)}.",
    )


# table: (function, results file)
TABLES = {
    "quality": (quality_table, "quality"),
    "parts": (parts_table, "quality"),
    "overhead": (overhead_table, "overhead"),
    "memory": (memory_table, "memory"),
    "pivots": (pivots_table, "kernels"),
    "kernels": (kernels_table, "kernels"),
    "pivot_quality": (pivot_quality_table, "pivot_quality"),
    "hidden_size": (hidden_size_table, "hidden_size"),
    "combined": (combined_table, "quality"),
    "hidden_error": (hidden_error_table, "hidden_size"),
    "faults": (faults_table, "faults"),
    "processes": (processes_table, "processes"),
    "sketch_quality": (sketch_table, "sketch_quality"),
}


def table(name: str) -> str:
    """The table of that name from the newest rows."""
    make, results = TABLES[name]
    return make() if read_rows(results) else "Not measured yet."


def render(text: str) -> str:
    """The text with every `<!-- table: NAME -->` … `<!-- end -->` block made anew."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: match[1] + table(match[2]) + "\n" + match[3],
        text,
        flags=re.DOTALL,
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true")
    check = options.parse_args().check
    stale = False
    for document in DOCUMENTS:
        before = document.read_text()
        after = render(before)
        stale = stale or before != after
        if not check:
            document.write_text(after)
    if rows := quality_rows():
        for path, drawing in ((QUALITY, quality_svg(rows)), (LAYERS, layers_svg(rows))):
            stale = stale or not path.exists() or path.read_text() != drawing
            if not check:
                path.write_text(drawing)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
