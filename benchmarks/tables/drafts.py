"""The table of results as drafts for assisted decoding, in docs/engines.md."""

from harness import latest, read_rows

from tables.cells import markdown
from tables.gpu_measured import made_by


def drafts_table() -> str:
    """Return accepted tokens and speed of drafts, by form and size."""
    rows = latest(read_rows("drafts"), "model", "form", "asked", "device", "threads")
    lines = [
        [
            row["form"],
            f"{row['asked']:.0%}",
            f"{row['accepted_per_call']:.2f}",
            f"{row['equal_texts']} of {row['prompts']}",
            f"{row['speed_ratio']:.2f}",
        ]
        for row in sorted(rows, key=lambda row: (row["form"], row["asked"]))
    ]
    head = ["draft", "removed", "accepted tokens a call", "equal texts", "speed ÷ without a draft"]
    first = rows[0]
    caption = (
        f"Greedy, {first['draft_tokens']} proposed tokens a call, {first['dtype']}, {first['threads']} threads; "
        f"{first['model']}; {made_by(rows)}."
    )
    return markdown(head, lines, caption)
