"""Table of the share of the calibration text that the model writes itself: what it gains, and what it costs."""

from compare import CONFIDENCE, compare_rows
from harness import Row, latest
from quality_rows import comparable_rows, with_seeds

from oneshot.text import SELF
from tables.cells import difference_cells, markdown, origin, score_cell
from tables.paired import BROAD, SIZE, TOKENS, Choice

LEAST_SECONDS = 10.0  # that a text takes if the row's own run wrote it
MIXTURES = [BROAD, f"{BROAD}+{BROAD}+{BROAD}+{SELF}", f"{BROAD}+{SELF}", f"{BROAD}+{SELF}+{SELF}+{SELF}", SELF]


def own_text_table() -> str:
    """Scores by the share of the model's own text, beside those without it, and the time that the writing takes."""
    dense, *rows = comparable_rows()
    found = {mixture: latest(Choice(calibration=mixture).rows(rows), "seed") for mixture in MIXTURES}
    without = found[BROAD]
    lines, shown = [], []
    for mixture, same in found.items():
        if not same or not without:
            continue
        shown += same
        (joined,) = with_seeds(same)
        test = ["–"] * 4 if mixture == BROAD else difference_cells(compare_rows(same, without))
        lines.append([f"{_share(mixture):.0%}", mixture, score_cell(joined, 3), *test[:3], _writing(same)])
    if not lines:
        return "Not measured yet."
    return markdown(
        [
            *("written by the model", "`--calibration`", "score", "change of the score"),
            *(f"{CONFIDENCE:.0%} interval", "p", "time for the text ÷ rest of the run"),
        ],
        lines,
        f"The default in the per-layer form, {SIZE:.0%} removed, {TOKENS:,} tokens of all sources together. The change "
        "is paired, against the first line, over the seeds that both have; a change in bold has an interval without 0. "
        f"{dense['model']}, fp32, first {dense['max_windows']} windows of {len(dense['texts'])} kinds of text; "
        f"{origin(shown)}.",
    )


def _share(mixture: str) -> float:
    sources = mixture.split("+")
    return sources.count(SELF) / len(sources)


def _writing(rows: list[Row]) -> str:
    """Seconds until the text is ready ÷ all others, of the last seed that has them.

    A run for several sizes writes its text before the first, which alone counts the time.
    """
    timed = [row["seconds"] for row in rows if row.get("seconds", {}).get("prepare", 0.0) > LEAST_SECONDS]
    if not timed:
        return "–"
    return f"{timed[-1]['prepare'] / (timed[-1]['total'] - timed[-1]['prepare']):.2f}"
