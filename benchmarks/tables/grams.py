"""The table of factorisations of singular and indefinite Grams, before and after the rule of `linalg/psd.py`."""

from collections.abc import Sequence

from harness import Row, latest, read_rows

from tables.cells import markdown, origin

MUCH = 10.0  # times the rounding; a factorisation that returns less is right


def singular_grams_table() -> str:
    """Return what became of Grams of each rank and rounding, the worst over spectra, by factorisation."""
    rows = latest(read_rows("singular_grams"), "factorisation", "rank", "spectrum", "rounding", "is_before")
    names = list(dict.fromkeys(row["factorisation"] for row in rows))
    kinds = list(dict.fromkeys((row["rounding"], row["rank"]) for row in rows))
    lines = []
    for rounding, rank in sorted(kinds, key=lambda kind: kind[0]):
        same = [row for row in rows if (row["rounding"], row["rank"]) == (rounding, rank)]
        lines.append(
            [rounding, rank, *(_cell([row for row in same if row["factorisation"] == name]) for name in names)]
        )
    count = sum(row["grams"] for row in rows if row["factorisation"] == names[0] and not row["is_before"])
    size = rows[0]["size"]
    return markdown(
        ["sums", "rank", *names],
        lines,
        f"Before → after the rule; the worst of {count // len(kinds)} Grams of {size} columns, with and without "
        "a massive activation. *crash*: an exception. × n: the result has n times the rounding of its Gram. *ok*: less "
        f"than {MUCH:.0f} times. {origin(rows)}.",
    )


def _cell(rows: Sequence[Row]) -> str:
    before, after = (_outcome([row for row in rows if row["is_before"] == earlier]) for earlier in (True, False))
    return before if before == after else f"{before} → {after}"


def _outcome(rows: Sequence[Row]) -> str:
    if any(row["raised"] for row in rows):
        return "crash"
    worst = max((row["times_rounding"] for row in rows), default=0.0)
    return "ok" if worst < MUCH else f"× {worst:.0e}"
