"""Table of the default's parts, each on and off, with a paired test over windows and seeds."""

from dataclasses import dataclass, field
from typing import Any

from compare import CONFIDENCE, compare_rows
from harness import Row, latest
from quality_rows import USUAL_CALIBRATIONS, comparable_rows, with_seeds

from tables.cells import difference_cells, markdown, origin, score_cell

SIZE = 0.2
BROAD, SELF = (name for name, _ in USUAL_CALIBRATIONS)
TOKENS = USUAL_CALIBRATIONS[0][1]


@dataclass(frozen=True)
class Choice:
    """Rows of the default recipe at one size: their form, calibration text and further settings."""

    settings: dict[str, Any] = field(default_factory=dict)
    form: str = "per-layer"
    calibration: str = SELF

    def rows(self, rows: list[Row]) -> list[Row]:
        """Return the newest row of every seed and text, the first seed first."""
        wanted = ("oneshot", SIZE, TOKENS, self.form, self.calibration, self.settings)
        names = ("recipe", "asked", "calibration_tokens", "form", "calibration", "settings")
        same = [row for row in rows if tuple(row[name] for name in names) == wanted]
        return sorted(latest(same, "seed", "calibration_hash"), key=lambda row: row["seed"])


PARTS = {  # part: with it, without it
    "ranks of linears": (Choice(), Choice({"ranks": "none"})),
    "ranks of the embedding": (Choice(), Choice({"embedding": "none"})),
    "half of the text from the model itself": (Choice(), Choice(calibration=BROAD)),
    "correction": (Choice(), Choice({"correction": "none"})),
    "a quarter of the residual": (Choice(), Choice({"residual_weight": 0})),
    "a size of its own for every layer": (Choice({"ranks": "none", "embedding": "none"}), Choice(form="stock")),
    "`--up-steps 4`": (Choice({"up_steps": 4}), Choice()),
}


def _both(on: Choice, off: Choice, rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Return the newest row of both choices for every seed that both have.

    What a model writes itself differs between versions and machines, at the same seed. So the newest rows with equal
    text are returned if there are any, or else rows of the same time, unless the text is what the choices differ in.
    """
    with_part, without = on.rows(rows), off.rows(rows)
    if on.calibration == off.calibration:
        with_part, without = _beside(with_part, without), _beside(without, with_part)
    return latest(with_part, "seed"), latest(without, "seed")


def _beside(rows: list[Row], others: list[Row]) -> list[Row]:
    """Return a row for every seed that the others have: on their text, or else no newer than theirs if there is one."""
    found = []
    for seed in sorted({row["seed"] for row in rows} & {other["seed"] for other in others}):
        own, of_others = ([row for row in side if row["seed"] == seed] for side in (rows, others))
        texts, newest = ({other[key] for other in of_others} for key in ("calibration_hash", "date"))
        equal = [row for row in own if row["calibration_hash"] in texts]
        earlier = [row for row in own if row["date"] <= max(newest)]
        found.append((equal or earlier or own)[-1])
    return found


def paired_parts_table() -> str:
    """Every part on and off at one size: scores over the seeds, and the paired difference if it can be tested."""
    rows = comparable_rows()
    lines, shown = [], []
    for part, (on, off) in PARTS.items():
        with_part, without = _both(on, off, rows[1:])
        if not with_part or not without:
            continue
        shown += [*with_part, *without]
        (one,), (other,) = with_seeds(with_part), with_seeds(without)
        removed = [f"{row['sparsity']:.1%}" for row in (one, other)]
        sizes = removed[0] if removed[0] == removed[1] else " / ".join(removed)
        test = difference_cells(compare_rows(with_part, without))
        lines.append([part, sizes, score_cell(one, 3), score_cell(other, 3), *test])
    if not lines:
        return "Not measured yet."
    return markdown(
        [
            *("part", "stored removed", "score with it", "score without it", "change of the score"),
            *(f"{CONFIDENCE:.0%} interval", "p", "change by seed"),
        ],
        lines,
        f"The default with `{SELF}`, {TOKENS:,} tokens, in the per-layer form. The line with sizes for layers has no "
        "ranks and is compared with the stock form. `--up-steps` is not in the default. Scores: mean ± standard "
        "deviation over the seeds. The change is paired: the same windows, the same seed, with the part and without, "
        "on the same calibration text if there are such rows. The interval is for other windows and other seeds, of a "
        "line with one seed for other windows only. One that leaves out 0 is set in bold. Rows older than window "
        "losses have no test (–). "
        f"{rows[0]['model']}, fp32, first {rows[0]['max_windows']} windows of {len(rows[0]['texts'])} kinds of text; "
        f"{origin(shown)}.",
    )
