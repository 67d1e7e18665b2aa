"""Numbers inside sentences of the documents, from the rows of a GPU."""

from harness import latest

from tables.gpu_measured import rows_of

FORMS = ("per-layer", "per-layer, expanded")


def seconds_of_7b() -> str:
    """Return how long the newest runs took that compressed a 7B with random weights in both forms."""
    newest = {row["form"]: row["wall_seconds"] for row in rows_of("compress") if row["model"] == "7B"}
    return f"{newest['stock']:.0f} seconds in the stock form, and {newest['per-layer']:.0f} in the per-layer form"


def seconds_of_coder() -> str:
    """Return how long all sizes of the coder model took."""
    [row] = (row for row in rows_of("quality seconds") if row["section"] == "quality, coder")
    return f"{sum(one['total'] for one in row['seconds']):.0f} seconds"


def faster_7b() -> str:
    """Return how much faster a smaller 7B in the per-layer form is in CUDA graphs, as it is opened and expanded."""
    rows = [row for row in rows_of("speed") if row.get("model") == "7B" and row["how"] == "CUDA graph"]
    rows = latest(rows, "form", "sequences", "length")
    dense = {(row["sequences"], row["length"]): row for row in rows if row["form"] == "dense"}
    spans = []
    for measure, what in (("prefill_seconds", "prefill"), ("decode_seconds", "decoding")):
        ratios = [
            dense[row["sequences"], row["length"]][measure] / row[measure] for row in rows if row["form"] in FORMS
        ]
        spans.append(f"{what} {min(ratios):.2f} to {max(ratios):.2f} times")
    return " and ".join(spans)
