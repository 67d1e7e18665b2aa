"""Tables of the papers' claims on MiniLM: mean and standard deviation over the seeds of the calibration text."""

from statistics import fmean

from harness import Row, latest, read_rows

from tables.cells import by_variant, markdown, origin, spread, token_span

MEASURES = ("agreement", "cosine", "retrieval")


def minilm_table(group: str) -> str:
    """Return the variants of a group, and the dense model."""
    rows = latest(read_rows("minilm"), "variant", "seed")
    chosen = [row for row in rows if row["variant"].split("/")[0] == group]
    if not chosen:
        return "Not measured yet."
    dense = next(row for row in rows if row["variant"] == "dense")
    lines = []
    for name, same in by_variant(chosen).items():
        removed = fmean(row["sparsity"] for row in same)
        numbers = [spread([row["measures"][measure] for row in same]) for measure in MEASURES]
        lines.append([name.split("/")[1].replace("-", " "), f"{removed:.1%}", *numbers])
    return markdown(("variant", "stored parameters removed", *MEASURES), lines, caption(chosen, dense))


def caption(rows: list[Row], dense: Row) -> str:
    """Return what the rows have in common."""
    seeds = sorted({row["seed"] for row in rows})
    span = token_span(row["tokens"] for row in rows)
    return (
        f"{rows[0]['model']}; {rows[0]['judged']} questions of BoolQ search {rows[0]['judged']} passages (dense model: "
        f"{dense['measures']['retrieval']:.3f} found); calibrated on {span} tokens of other questions and passages; "
        f"seeds {', '.join(map(str, seeds))}; {origin(rows)}."
    )
