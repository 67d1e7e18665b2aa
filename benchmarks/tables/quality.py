"""Tables of how good the compressed models are."""

from harness import Row, key_of
from judging import KINDS, task_values
from quality_rows import KEYS, quality_rows, varies_a_part

from tables.cells import markdown, origin, rounded, score_cell, settings, standard_error

WIKITEXT2 = "wikitext2_valid.txt"  # calibrated on what other tools are calibrated on


def quality_table() -> str:
    """Score, worst kind of text, ratios and task accuracies of every model, over five kinds of text."""
    rows = quality_rows()
    if not rows:
        return "No rows yet: run `python benchmarks/quality.py`."
    dense, *compressed = rows
    compressed = [row for row in compressed if not varies_a_part(row)]
    lines = [[f"0 ({dense['stored_parameters'] / 1e6:.1f} M)", "dense", "–", "–", "1", "–", *["1"] * len(KINDS)]]
    lines[0].append(_accuracy(dense, dense))
    with_tasks = {key_of(row, *KEYS): row for row in quality_rows(with_tasks=True)[1:]}
    for row in sorted(compressed, key=lambda row: (row["asked"], row["score"])):
        ratios = {kind: row["perplexity"][kind] / dense["perplexity"][kind] for kind in KINDS}
        lines.append(
            [
                f"{row['sparsity']:.1%}",
                f"**{row['recipe']}**" if row["recipe"] == "oneshot" else row["recipe"],
                row["form"],
                _calibrated(row, compressed),
                score_cell(row),
                KINDS[row["worst"]],
                *(rounded(ratio) for ratio in ratios.values()),
                _accuracy(with_tasks.get(key_of(row, *KEYS), {}), dense),
            ]
        )
    tasks = task_values(dense.get("tasks", {}), "chosen")
    dense_values = ", ".join(f"{dense['perplexity'][kind]:.2f}" for kind in KINDS)
    accuracies = ""
    if tasks:
        documents = f"the first {dense['task_limit']} documents of {', '.join(tasks)}"
        error = standard_error(tasks)
        accuracies = (
            f" Accuracy (by length-normalised likelihood if the task has it): mean over {documents}; "
            f"standard error {100 * error:.1f} points. The newest model of a line may have none; then it is an older "
            "one's."
        )
    return markdown(
        [
            *("stored removed", "method", "form", "settings", "score", "worst kind"),
            *(f"{text} ({kind})" for text, kind in KINDS.items()),
            "mean accuracy",
        ],
        lines,
        f"Perplexity ÷ dense for every kind of text (dense: {dense_values}); score: their geometric mean.{accuracies} "
        f"{dense['model']}, fp32, first {dense['max_windows']} windows of {dense['sequence_length']} tokens of each "
        f"text; {origin([dense, *compressed])}.",
    )


def parts_table() -> str:
    """Scores of the default with one part or its text changed, beside the default at the same size and form."""
    rows = [
        row for row in quality_rows() if row["recipe"] == "oneshot" and not row["calibration"].startswith(WIKITEXT2)
    ]
    varied = [row for row in rows if varies_a_part(row) or row["calibration"] != rows[0]["calibration"]]
    if not varied:
        return "Not measured yet."
    sizes = {(row["asked"], row["form"]) for row in varied}
    shown = [row for row in rows if (row["asked"], row["form"]) in sizes]
    lines = [
        [
            *(f"{row['sparsity']:.1%}", row["form"], settings(row) or "–", row["calibration"]),
            *(
                f"{row['calibration_tokens']:,}",
                score_cell(row, 3),
                f"{row['worst_ratio']:.2f} ({KINDS[row['worst']]})",
            ),
        ]
        for row in sorted(shown, key=lambda row: (row["asked"], row["form"], row["score"]))
    ]
    return markdown(
        ["stored removed", "form", "settings", "text", "tokens", "score", "worst kind"],
        lines,
        f"Score: geometric mean over five kinds of text of perplexity ÷ dense; {rows[0]['model']}, fp32, first "
        f"{rows[0]['max_windows']} windows of each text; {origin(shown)}.",
    )


def tokens_table() -> str:
    """Return the scores of the default in the stock form by the size of the calibration set."""
    rows = [row for row in quality_rows() if row["recipe"] == "oneshot" and not row["settings"]]
    rows = [row for row in rows if (row["asked"], row["form"], row["calibration"]) == (0.2, "stock", "general.jsonl")]
    rows = sorted(rows, key=lambda row: row["calibration_tokens"])
    return markdown(
        ["tokens", "score"],
        [[f"{row['calibration_tokens']:,}", score_cell(row, 3)] for row in rows],
        "Perplexity ÷ dense, geometric mean over five kinds of text; `general.jsonl`, stock form, 20 % removed; "
        f"{rows[0]['model']}.",
    )


def _calibrated(row: Row, rows: list[Row]) -> str:
    """Settings of a row, and its calibration where rows have different ones."""
    texts = {(other["calibration"], other["calibration_tokens"]) for other in rows if other["calibration_tokens"]}
    parts = [settings(row)] if row["settings"] else []
    if len(texts) > 1 and row["calibration_tokens"]:
        parts.append(f"{row['calibration']}, {row['calibration_tokens']:,} tokens")
    return "; ".join(parts) or "–"


def _accuracy(row: Row, dense: Row) -> str:
    """Mean accuracy where it is over the same documents as the dense model's."""
    own, others = (task_values(one.get("tasks", {}), "chosen") for one in (row, dense))
    same = own and list(own) == list(others) and row["task_limit"] == dense["task_limit"]
    return f"{row['mean_accuracy']:.1%}" if same else "–"
