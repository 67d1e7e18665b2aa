"""Tables of docs/gpu.md: estimates of gpu_estimate.py, counts of gpu_counts.py, and sums.py's measurements on a CPU."""

from gpu_estimate import MIXTURES
from harness import Row, read_rows

from tables.cells import markdown

GIB = 2**30


def estimates(*, of_mixtures: bool = False) -> list[Row]:
    """Return the rows of today's code for one GPU, of dense models or of mixtures; the first run has another table."""
    rows = [row for row in read_rows("gpu_estimate") if "measured" not in row and "processes" not in row]
    return [row for row in rows if (row["model"] in MIXTURES) == of_mixtures]


def shown() -> list[Row]:
    """Return the rows of dense models in the document: the H200 is nearly as the H100, and own text adds its time."""
    return [row for row in estimates() if row["card"] != "H200" and (row["model"] == "7B" or "self" not in row["run"])]


def gpu_times_table() -> str:
    """Seconds by phase."""
    head = ["model", "card", "run", "start and text", "forward", "sums", "pivots", "solve", "rest", "total, estimated"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * 3 + "--:|" * 7]
    for row in shown():
        cells = _seconds(row) if row["fits"] else ["does not fit", *[""] * 6]
        lines.append("| " + " | ".join([row["model"], row["card"], row["run"], *cells]) + " |")
    return "\n".join(lines)


def _seconds(row: Row) -> list[str]:
    """Prepare; then phases of the profile and of the layers added up, and all that is left of the total."""
    phases = row["phases"]
    stages = [phases.get(stage, {}) for stage in ("profile", "layers")]
    sums = [sum(stage.get(name, 0.0) for stage in stages) for name in ("forward", "sums", "pivots", "solve")]
    named = (sum(phases["prepare"].values()), *sums)
    return [*(f"{value:.0f}" for value in (*named, row["total"] - sum(named))), f"**{row['total']:.0f} s**"]


def gpu_memory_table() -> str:
    """Peaks on the card and on the host, and where activations are."""
    lines = [
        "| model | card | run | device, estimated | at | host, estimated | activations on |",
        "|---|---|---|--:|---|--:|---|",
    ]
    for row in shown():
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


def mixture_estimates_table() -> str:
    """Seconds by phase and peaks of runs on mixtures."""
    lines = []
    for row in estimates(of_mixtures=True):
        device = f"{row['device_bytes'] / GIB:.1f} GiB" if row["device_bytes"] else "–"
        host = f"{row['host_bytes'] / GIB:.1f} GiB"
        batch = f"{row['batch_size']}"
        lines.append(
            [row["model"], row["card"], row["run"], batch, device, host, f"{row['expert_groups']}", *_seconds(row)]
        )
    head = ["model", "machine", "run", "batch", "device", "host", "groups of experts"]
    head += ["start", "forward", "sums", "pivots", "solve", "rest", "total"]
    rates = read_rows("gpu_estimate")
    cpu = next(row["rates"]["stream"] for row in rates if row["card"] == "CPU")
    return markdown(
        head,
        lines,
        f"Predicted peaks and seconds, not measured: {row['tokens']:,} tokens, bfloat16, the sizes of the model's own "
        "config.json; neurons: `--sparsity 0.2`. Batch: sequences of 2,048 tokens. "
        f"The CPU has {cpu / 1e12:g} TFLOP/s.",
    )


def shared_estimates_table() -> str:
    """Seconds of large models by the number of GPUs, and what each of them and the host need."""
    rows = [row for row in read_rows("gpu_estimate") if "processes" in row and row["card"] != "CPU"]
    found = {(row["model"], row["run"], row["processes"]): row for row in rows}
    counts = sorted({row["processes"] for row in rows})
    lines = []
    for model, run in dict.fromkeys((row["model"], row["run"]) for row in rows):
        of = [found[model, run, count] for count in counts]
        peaks = [
            f"{of[0][name] / GIB:.0f} GiB" for name in ("model_bytes", "device_bytes", "host_bytes", "scratch_bytes")
        ]
        lines.append([model, run, *peaks, *(f"{row['total']:.0f} s" for row in of)])
    head = ["model", "run", "file", "a GPU's memory", "a process's memory", "scratch disk"]
    head += ["1 GPU", *(f"{count} GPUs" for count in counts[1:])]
    tokens = sorted({row["tokens"] for row in rows})
    return markdown(
        head,
        lines,
        f"Predicted, not measured: H100, {' or '.join(f'{count:,}' for count in tokens)} tokens, `--sparsity 0.2`, "
        "bfloat16, the sizes of the models' own config.json.",
    )


STAGES = ("prepare", "curvature", "profile", "layers")


def process_estimates_table() -> str:
    """Return how many times as fast more processes are by the prediction, by stage."""
    rows = [row for row in read_rows("gpu_estimate") if "processes" in row and row["card"] == "CPU"]
    found = {(row["model"], row["run"], row["processes"]): row for row in rows}
    counts = sorted({row["processes"] for row in rows})
    lines = []
    for model, run in dict.fromkeys((row["model"], row["run"]) for row in rows):
        alone = found[model, run, 1]
        for count in counts[1:]:
            of = found[model, run, count]
            gains = [_gain(sum(alone["phases"][stage].values()), sum(of["phases"][stage].values())) for stage in STAGES]
            lines.append([model, run, str(count), *gains, _gain(alone["total"], of["total"])])
    tokens = sorted({row["tokens"] for row in rows})
    return markdown(
        ["model", "run", "processes", *STAGES, "all"],
        lines,
        f"Predicted: how many times as fast as one process; {' or '.join(f'{count:,}' for count in tokens)} tokens, "
        "`--sparsity 0.2`. “self”: half of the text is written by the model, while it prepares.",
    )


def _gain(alone: float, shared: float) -> str:
    return f"{alone / shared:.2f}"
