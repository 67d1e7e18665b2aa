"""The table of what training after the compression brings, in docs/guides/heal.md."""

from harness import Row, latest, read_rows

from tables.cells import markdown
from tables.gpu_measured import made_by, rows_of

WAYS = {
    "distil": "all weights, towards the dense model's distribution",
    "full": "all weights, next token",
    "lora": "adapters (LoRA of rank 16), next token",
}


def heal_table() -> str:
    """Score before and after some steps of training, by form, size and way."""
    rows = latest([*read_rows("heal"), *rows_of("heal")], "model", "form", "asked", "way", "steps", "device")
    lines = [_line(row) for row in sorted(rows, key=lambda row: (row["form"], row["asked"], row["way"]))]
    head = ["form", "removed", "trained", "steps", "tokens", "score before", "score after", "seconds", "device"]
    caption = (
        "Trained on general.jsonl, judged on five other kinds of text, on a CPU on fewer windows of them; seconds of a "
        "CPU are one core's; SmolLM2-135M-Instruct, float32"
    )
    return markdown(head, lines, f"{caption}; {made_by(rows)}.")


def _line(row: Row) -> list[str]:
    return [
        row["form"],
        f"{row['asked']:.0%}",
        WAYS[row["way"]],
        str(row["steps"]),
        f"{row['tokens']:,}",
        f"{row['score_before']:.3f}",
        f"**{row['score']:.3f}**",
        f"{row['cpu_seconds' if 'threads' in row else 'seconds']:.0f}",
        row["device"],
    ]
