"""Numbers inside sentences of the documents, from rows."""

from statistics import fmean

from harness import latest

from tables.gpu_measured import rows_of
from tables.mixtures import rows_of_mixture, usual_tokens

FORMS = ("per-layer", "per-layer, expanded")


def seconds_of_7b() -> str:
    """Return how long the newest runs took that compressed a 7B with random weights in both forms."""
    newest = {row["form"]: row["wall_seconds"] for row in rows_of("compress") if row["model"] == "7B"}
    return f"{newest['stock']:.0f} seconds in the stock form, and {newest['per-layer']:.0f} in the per-layer form"


def seconds_of_coder() -> str:
    """Return how long all sizes of the coder model took."""
    [row] = (row for row in rows_of("quality seconds") if row["section"] == "quality, coder")
    return f"{sum(one['total'] for one in row['seconds']):.0f} seconds"


def stock_of_others() -> str:
    """Return the scores of the coder and of Gemma in the stock form at −20 %."""
    rows = {row["section"]: row for row in rows_of("quality") if row.get("form") == "stock" and row["asked"] == 0.2}
    return " and ".join(f"{rows[f'quality, {name}, stock']['score']:.2f}" for name in ("coder", "gemma"))


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


def half_of_a_mixture() -> str:
    """Return the score without half of the experts' parameters by the default, and by REAP as published."""
    rows = [row for row in rows_of_mixture("trained") if row["share"] == 0.5 and row["router"] == "none"]
    rows = [row for row in rows if row["calibration_tokens"] == usual_tokens(rows)]

    def mean(selector: str, correction: str) -> float:
        same = [row for row in rows if (row["selector"], row["correction"]) == (selector, correction)]
        return fmean(row["score"] for row in same)

    ours, published = mean("own sizes", "engine two-stream"), mean("reap", "none")
    removed = "where REAP removes half of the experts, as published"
    return f"{ours:.2f} times the whole one's, and {published:.2f} times {removed}"
