"""Tables of the papers' claims on MiniLM: mean and standard deviation over the seeds of the calibration text."""

from statistics import fmean

from harness import Row, latest, read_rows

from tables.cells import by_variant, markdown, origin, spread, token_span

MEASURES = ("agreement", "neighbours", "cosine", "retrieval")


def minilm_table(group: str) -> str:
    """Return the variants of a group, and the dense model."""
    rows = latest(read_rows("minilm"), "variant", "seed")
    chosen = [row for row in rows if row["variant"].split("/")[0] == group]
    if not chosen:
        return "Not measured yet."
    dense = next(row for row in rows if row["variant"] == "dense")
    measures = [one for one in MEASURES if any(one in row["measures"] for row in chosen)]
    lines = []
    for name, same in by_variant(chosen).items():
        removed = fmean(row["sparsity"] for row in same)
        numbers = [_spread(same, measure) for measure in measures]
        lines.append([name.split("/")[1].replace("-", " "), f"{removed:.1%}", *numbers])
    return markdown(("variant", "stored parameters removed", *measures), lines, caption(chosen, dense))


def _spread(rows: list[Row], measure: str) -> str:
    """Return the mean and the deviation of a measure; rows that are older than `neighbours` lack it."""
    known = [row["measures"][measure] for row in rows if measure in row["measures"]]
    return spread(known) if known else "–"


def caption(rows: list[Row], dense: Row) -> str:
    """Return what the rows have in common."""
    seeds = sorted({row["seed"] for row in rows})
    span = token_span(row["tokens"] for row in rows)
    return (
        f"{rows[0]['model']}; {rows[0]['judged']} questions of BoolQ search {rows[0]['judged']} passages (dense model: "
        f"{dense['measures']['retrieval']:.3f} found); calibrated on {span} tokens of other questions and passages; "
        f"seeds {', '.join(map(str, seeds))}; {origin(rows)}."
    )
