"""What the tables have in common: their form, and cells for numbers, settings and origins."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import stdev

from compare import Difference
from harness import Row

CURVATURE = ("curvature", "fisher")  # today's default in the per-layer form
TEXTS = ("wikitext2", "lambada")  # of the tables that have two


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], caption: str) -> str:
    """A table and a line below it that says what the rows have in common."""
    body = [header, ["---"] * len(header), *lines]
    return "\n".join([*("| " + " | ".join(cells) + " |" for cells in body), "", caption])


def rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def token_span(counts: Iterable[int]) -> str:
    """Return the least and the largest count; one number if they are equal."""
    different = sorted(set(counts))
    return f"{different[0]:,}" if len(different) == 1 else f"{different[0]:,} to {different[-1]:,}"


def score_cell(row: Row, places: int = 2) -> str:
    """Score of a row of `quality_rows()`; mean and standard deviation if there are several seeds."""
    value = rounded(row["score"]) if places == 2 else f"{row['score']:.{places}f}"
    return f"{value} ± {stdev(row['scores']):.3f}" if "scores" in row else value


def settings(row: Row) -> str:
    """Return the settings of a row in words; older rows call the form tier.

    Output curvature became a default later than the per-layer form, so rows of that form say which they have.
    """
    names = {name: "form" if name == "tier" else name.replace("_", " ") for name in row["settings"]}
    words = [f"{names[name]} {value}" for name, value in row["settings"].items() if (name, value) != CURVATURE]
    is_older = (row.get("recipe"), row.get("form")) == ("oneshot", "per-layer") and CURVATURE[0] not in row["settings"]
    return ", ".join([*words, *(["without output curvature"] if is_older else [])])


def origin(rows: list[Row]) -> str:
    """Machines, threads and commits of the rows."""
    machines = ", ".join(sorted({row["device"] for row in rows}))
    threads = ", ".join(sorted({str(row["threads"]) for row in rows}))
    commits = ", ".join(sorted({row["commit"] + ("+" if row["dirty"] else "") for row in rows}))
    return f"{machines}, {threads} threads; commits {commits}"


def standard_error(values: Mapping[str, tuple[float, float]]) -> float:
    """Return the standard error of the mean over tasks of `task_values`: they are independent, and count alike."""
    return math.hypot(*(error for _, error in values.values())) / len(values)


def difference_cells(difference: Difference | None) -> list[str]:
    """Change of the score, interval, p, and the change of every seed."""
    if difference is None:
        return ["–"] * 4
    change = _percent(difference.mean)
    interval = f"{_percent(difference.low)} … {_percent(difference.high)}"
    return [
        f"**{change}**" if difference.is_real else change,
        interval,
        f"{difference.p:.1g}",
        ", ".join(_percent(value) for value in difference.by_seed),
    ]


def _percent(log_ratio: float) -> str:
    """Return a difference of losses as a change of the score."""
    return f"{math.expm1(log_ratio):+.1%}".replace("-", "−")
