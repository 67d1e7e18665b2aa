"""Tables of what `gpu.py` measured on GPUs, in docs/gpu.md and the kernels' documents."""

from collections.abc import Sequence

from harness import Row, latest, read_rows

from tables.cells import markdown

GB = 1e9
MIXTURE = "30B-A3B"  # the model of the sections on a mixture


def rows_of(*kinds: str) -> list[Row]:
    """Return the rows of these kinds that a GPU made, oldest first."""
    return [row for row in read_rows("gpu") if row["kind"] in kinds and row["device"] != "cpu"]


def made_by(rows: Sequence[Row]) -> str:
    """Return the cards and commits of rows."""
    devices, commits = (list(dict.fromkeys(str(row[name]) for row in rows)) for name in ("device", "commit"))
    return f"{', '.join(devices)}; commits {', '.join(commits)}"


def gpu_runs_table() -> str:
    """Whole runs: seconds by stage and peaks, measured and predicted before the run."""
    rows = latest([row for row in rows_of("compress") if row["model"] != MIXTURE], "model", "form")
    lines = []
    for row in rows:
        stages = [f"{row['seconds'][stage]:.1f}" if stage in row["seconds"] else "–" for stage in STAGES]
        predicted = row["predicted"]
        total = f"**{row['wall_seconds']:.1f} s** / {predicted['seconds']['total']:.0f} s"
        device = f"{row['peak_device_bytes'] / GB:.1f} / {predicted['device_bytes'] / GB:.1f} GB"
        host = f"{row['peak_bytes'] / GB:.1f} / {predicted['host_bytes'] / GB:.1f} GB"
        lines.append([row["model"], row["form"], row["commit"], _card(row), *stages, total, device, host])
    head = ["model", "form", "commit", "card", *STAGES, "in all / predicted", "device / predicted", "host / predicted"]
    caption = "Measured seconds by stage and peaks; 262,144 tokens, `--sparsity 0.2`, bfloat16, random weights."
    return markdown(head, lines, caption)


STAGES = ("prepare", "curvature", "profile", "layers", "write")


def _card(row: Row) -> str:
    return row["device"].removeprefix("NVIDIA ").split()[0]
