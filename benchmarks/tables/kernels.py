"""Tables of the kernels: seconds, and the quality of pivots."""

import math

from harness import Row, fitted_exponent, latest, read_rows

from tables.cells import markdown, origin


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
    return markdown(["seconds at n =", *map(str, sizes), "exponent"], lines, f"Matrices of 4 n rows, {origin(rows)}.")


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
        f"Column pivots of a 4 n × n matrix in fp64, Gram and sketch included; {origin(rows)}.",
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
        f"k = n/2, {origin(rows)}. “–”: geqp3's error is itself rounding.",
    )


def _excess(row: Row | None) -> str:
    if row is None:
        return "–"
    rounding = row["excess"] is None or not math.isfinite(row["excess"]) or row["relative_error"] < 1e-12
    excess = "–" if rounding else f"{row['excess']:+.2%}" if row["excess"] < 1 else f"× {1 + row['excess']:.3g}"
    return f"{excess}; {row['max_interpolation']:.3g}"
