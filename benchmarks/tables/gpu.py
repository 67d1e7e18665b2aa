"""Tables of docs/gpu.md from the rows of benchmarks/gpu_estimate.py. Every number in them is estimated."""

from harness import Row, read_rows

GIB = 2**30
REST = ("energies", "condition", "output head", "embedding", "transfer")


def gpu_times_table() -> str:
    """Seconds by phase."""
    head = ["model", "card", "run", "start and text", "forward", "sums", "pivots", "solve", "rest", "total, estimated"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * 3 + "--:|" * 7]
    for row in read_rows("gpu_estimate"):
        cells = _seconds(row) if row["fits"] else ["does not fit", *[""] * 6]
        lines.append("| " + " | ".join([row["model"], row["card"], row["run"], *cells]) + " |")
    return "\n".join(lines)


def _seconds(row: Row) -> list[str]:
    """Prepare; then every phase of the profile plus that of the layers."""
    phases = row["phases"]
    stages = [phases.get(stage, {}) for stage in ("profile", "layers")]
    sums = [sum(stage.get(name, 0.0) for stage in stages) for name in ("forward", "sums", "pivots", "solve")]
    rest = sum(stage.get(name, 0.0) for stage in stages for name in REST)
    return [f"{value:.0f}" for value in (sum(phases["prepare"].values()), *sums, rest)] + [f"**{row['total']:.0f} s**"]


def gpu_memory_table() -> str:
    """Peaks on the card and on the host, and where activations are."""
    lines = [
        "| model | card | run | device, estimated | at | host, estimated | activations on |",
        "|---|---|---|--:|---|--:|---|",
    ]
    for row in read_rows("gpu_estimate"):
        names = f"| {row['model']} | {row['card']} | {row['run']} |"
        if not row["fits"]:
            lines.append(f"{names} {_needed(row['reason'])} | | | |")
            continue
        device, host = row["device_bytes"] / GIB, row["host_bytes"] / GIB
        lines.append(f"{names} {device:.1f} GiB | {row['device_stage']} | {host:.1f} GiB | {row['store']} |")
    return "\n".join(lines)


def _needed(reason: str) -> str:
    """Shorten `MemoryLimitError`'s sentence: what is needed, and for what."""
    return "does not fit: " + reason.removeprefix("The run needs ").partition(", more than")[0]
