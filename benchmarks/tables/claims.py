"""Tables of the papers' claims on SmolLM2: mean and standard deviation over the seeds of the calibration text."""

from statistics import fmean

from harness import latest, read_rows

from tables.cells import by_variant, markdown, origin, spread, token_span


def claims_table(group: str) -> str:
    """Return the variants of a group."""
    chosen = [row for row in latest(read_rows("claims"), "group", "variant", "seed") if row["group"] == group]
    if not chosen:
        return "Not measured yet."
    lines = []
    for name, same in by_variant(chosen).items():
        numbers = [
            spread([row["score"] for row in same]),
            spread([fmean(row["kl_divergence"].values()) for row in same]),
            spread([fmean(row["top1_agreement"].values()) for row in same]),
            ", ".join(str(row["seed"]) for row in same),
        ]
        removed = fmean(row["sparsity"] for row in same)
        lines.append([name.replace("-", " "), f"{removed:.1%}", *numbers])
    titles = ("variant", "stored parameters removed", "score", "KL divergence", "agreement", "seeds")
    tokens = token_span(row["calibration_tokens"] for row in chosen)
    windows = next(iter(chosen[0]["texts"].values()))["windows"]
    return markdown(
        titles,
        lines,
        f"SmolLM2-135M-Instruct; calibrated on {tokens} tokens of general.jsonl; judged on {windows} windows of 1024 "
        "tokens of each of five other kinds of text. Score: perplexity ÷ dense, geometric mean; divergence in nats per "
        f"token; agreement of the next token; {origin(chosen)}.",
    )
