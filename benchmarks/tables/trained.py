"""Tables of the small models that `train_small.py` trains: mean and standard deviation over the calibration's seeds."""

from statistics import fmean

from harness import latest, read_rows

from tables.cells import by_variant, markdown, origin, spread, token_span

SUBJECTS = {
    "distilbert": "A DistilBERT classifier that we trained from scratch: from which package of Python's standard "
    "library a passage of code comes",
    "t5": "A T5 that we trained from scratch to sort, select and shift letters",
}


def trained_table(model: str) -> str:
    """Return the variants of a model, the dense model first."""
    rows = [row for row in latest(read_rows("trained"), "model", "variant", "seed") if row["model"] == model]
    compressed = [row for row in rows if row["variant"] != "dense"]
    if not compressed:
        return "Not measured yet."
    dense = next(row for row in rows if row["variant"] == "dense")
    measures = list(compressed[0]["measures"])
    known = (dense["measures"].get(measure) for measure in measures)
    lines = [["dense", "0", *("–" if value is None else f"{value:.3f}" for value in known)]]
    for name, same in by_variant(compressed).items():
        numbers = [spread([row["measures"][measure] for row in same]) for measure in measures]
        lines.append([name, f"{fmean(row['sparsity'] for row in same):.1%}", *numbers])
    tokens = token_span(row["tokens"] for row in compressed if row["tokens"])
    seeds = sorted({row["seed"] for row in compressed})
    return markdown(
        ("variant", "stored parameters removed", *measures),
        lines,
        f"{SUBJECTS[model]} ({dense['parameters']:,} parameters); judged on 500 other examples; calibrated on "
        f"{tokens} tokens; seeds {', '.join(map(str, seeds))}; {origin(compressed)}.",
    )
