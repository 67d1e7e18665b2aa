"""Rows of `quality.jsonl` that can be compared: equal windows, the newest of every kind, seeds joined."""

from statistics import fmean, geometric_mean

from harness import Row, key_of, latest, read_rows
from judging import KINDS

# (name, tokens) of the text that the default recipe is shown with
USUAL_CALIBRATIONS = (("general.jsonl", 131072), ("general.jsonl+self", 131072))


def comparable_rows() -> list[Row]:
    """All rows of `quality.jsonl` with all five kinds of text, those on the windows of the dense row that has the most.

    The newest such dense row comes first. Empty where there is no dense row.
    """
    rows = [row for row in read_rows("quality") if set(row["perplexity"]) == set(KINDS)]
    denses = [row for row in rows if row["recipe"] == "dense"]
    if not denses:
        return []
    dense = max(denses, key=lambda row: (row["max_windows"], row["date"]))
    return [dense, *(row for row in rows if row["recipe"] != "dense" and row["texts"] == dense["texts"])]


KEYS = ("model", "recipe", "asked", "form", "settings", "calibration", "calibration_tokens")  # of a line in a table


def quality_rows(*, with_tasks: bool = False) -> list[Row]:
    """The dense row of `comparable_rows()`, then one row for every model, size, form and setting.

    In the order of first appearance; several seeds are joined as by `with_seeds`. Empty where there is no dense row.
    `with_tasks`: of the rows that have tasks.
    """
    rows = comparable_rows()
    compressed = [row for row in rows[1:] if not with_tasks or row.get("tasks")]
    return [*rows[:1], *with_seeds(compressed, *KEYS)]


def with_seeds(rows: list[Row], *keys: str) -> list[Row]:
    """The newest row of the first seed for every combination of the keys.

    If there are several seeds, it has their `scores`, and the means of `score`, `worst_ratio` and (geometric)
    `perplexity` over them; everything else is of the first seed.
    """
    seeds: dict[tuple[str, ...], list[Row]] = {}
    for row in latest(rows, *keys, "seed"):
        seeds.setdefault(key_of(row, *keys), []).append(row)
    return [_joined(sorted(same, key=lambda row: row.get("seed", 0))) for same in seeds.values()]


def _joined(seeds: list[Row]) -> Row:
    """Join the rows of several seeds to one."""
    first = seeds[0]
    if len(seeds) == 1:
        return first
    scores = [row["score"] for row in seeds]
    return first | {
        "scores": scores,
        "score": fmean(scores),
        "worst_ratio": fmean(row["worst_ratio"] for row in seeds),
        "perplexity": {kind: _mean_perplexity(seeds, kind) for kind in first["perplexity"]},
    }


def _mean_perplexity(seeds: list[Row], kind: str) -> float:
    """Return the geometric mean over the seeds that were judged on this kind of text."""
    return geometric_mean(row["perplexity"][kind] for row in seeds if kind in row["perplexity"])


def varies_a_part(row: Row) -> bool:
    """Say whether a row of `quality_rows()` shows the default with another part or text, for the table of parts.

    `up_steps` is no such part: whoever has the time gets a better model.
    """
    usual = row["recipe"] != "oneshot" or (row["calibration"], row["calibration_tokens"]) in USUAL_CALIBRATIONS
    return bool(row["settings"].keys() - {"up_steps"}) or not usual
