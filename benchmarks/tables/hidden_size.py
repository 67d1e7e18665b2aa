"""Tables of the hidden size's subspaces."""

from harness import Row, latest, read_rows

from tables.cells import TEXTS, markdown, origin, scores, settings


def hidden_size_table() -> str:
    """Return perplexity and removed parameters by group size, correction and further settings."""
    rows = latest(read_rows("hidden_size"), "group_size", "correction", "settings", "hidden_size")
    dense = next(row["perplexity"] for row in rows if row["group_size"] is None)
    lines = [["dense", "–", "–", "0", "0", *(cell for text in TEXTS for cell in (f"{dense[text]:.2f}", "1"))]]
    rows = [row for row in rows if row["group_size"] is not None]
    for row in sorted(rows, key=lambda row: (row["correction"], len(row["settings"]), row["group_size"])):
        removed = (
            1 - row["stored_parameters"] / row["dense_parameters"],
            1 - row["layer_parameters"] / row["dense_layer_parameters"],
        )
        shares = [f"{share:.1%}" for share in removed]
        lines.append([_group(row), row["correction"], settings(row) or "–", *shares, *scores(row, dense)])
    return markdown(
        [
            *("sublayers in a group", "correction", "further settings", "stored removed", "removed in layers"),
            *("WikiText-2", "× dense", "LAMBADA text", "× dense"),
        ],
        lines,
        f"{rows[0]['model']}, every group {rows[0]['hidden_size']} of 576 wide, general.jsonl, "
        f"{rows[0]['calibration_tokens'] // 1024} × 1024 tokens; first {rows[0]['max_windows']} windows; "
        f"{origin(rows)}.",
    )


def hidden_error_table() -> str:
    """Return the predicted and measured error of attention's input by depth."""
    rows = [row for row in read_rows("hidden_size") if row.get("measured_error") and row["measured_error"][0]]
    rows = latest(rows, "group_size")
    if not rows:
        return "Not measured yet."
    depth = len(rows[0]["measured_error"]) // 2
    layers = [*range(0, depth, 5), depth - 1]
    lines = []
    for row in sorted(rows, key=lambda row: row["group_size"]):
        pairs = [(row["predicted_error"][2 * layer], row["measured_error"][2 * layer]) for layer in layers]
        lines.append([_group(row), *(f"{predicted:.3f} / {measured:.3f}" for predicted, measured in pairs)])
    return markdown(
        ["sublayers in a group", *(f"layer {layer}" for layer in layers)],
        lines,
        "Relative error of attention's input, predicted from the statistics / measured on the last batch of the "
        f"calibration text; {origin(rows)}.",
    )


def _group(row: Row) -> str:
    return str(row["group_size"] or "one for all")
