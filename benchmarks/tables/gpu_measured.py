"""Tables of what `gpu.py` measured on GPUs, in docs/gpu.md and the kernels' documents."""

from collections.abc import Sequence
from statistics import median

from harness import Row, latest, read_rows

from tables.cells import markdown
from tables.gpu import GIB, estimates

GB = 1e9
MIXTURE = "30B-A3B"  # the model of the sections on a mixture


def rows_of(*kinds: str) -> list[Row]:
    """Return the rows of these kinds that a GPU made, oldest first."""
    return [row for row in read_rows("gpu") if row["kind"] in kinds and row["device"] != "cpu"]


def made_by(rows: Sequence[Row]) -> str:
    """Return the cards and commits of rows."""
    devices, commits = (list(dict.fromkeys(str(row[name]) for row in rows)) for name in ("device", "commit"))
    return f"{', '.join(devices)}; commits {', '.join(commits)}"


def gpu_rates_table() -> str:
    """Measured rates beside those that estimates take."""
    ceilings = {row["what"]: row for row in latest(rows_of("ceiling"), "what")}
    others = {
        row["what"]: row for row in latest(rows_of("factorisation"), "what", "n", "dtype") if row.get("n") != 2048
    }
    measured = [
        f"{ceilings['product torch.bfloat16']['tflops']:.0f} TFLOP/s",
        f"{ceilings['product torch.float32']['tflops']:.0f} TFLOP/s",
        f"{ceilings['product torch.float64']['tflops']:.0f} TFLOP/s",
        f"{ceilings['memory']['gbps'] / 1000:.2f} TB/s",
        f"{ceilings['pinned upload']['gbps']:.0f} GB/s",
        f"{ceilings['upload']['gbps']:.0f} GB/s",
        f"{ceilings['launch']['microseconds']:.1f} µs",
        f"{others['solve_triangular one side']['seconds'] * 1000:.2f} ms",
    ]
    names = (
        *("bfloat16 products", "float32 products", "float64 products", "memory", "link, pinned", "link, pageable"),
        *("a launch", "one right-hand side of a triangle of 7,552, float64"),
    )
    cards = {row["card"]: row["rates"] for row in estimates()}
    assumed = [
        [
            *(f"{rates[name] / 1e12:.3g} TFLOP/s" for name in ("stream", "energies", "double")),
            *(f"{rates['bandwidth'] / 1e12:.2f} TB/s", f"{rates['link'] / GB:.0f} GB/s", "–", "–", "–"),
        ]
        for rates in cards.values()
    ]
    lines = [list(cells) for cells in zip(names, measured, *assumed, strict=True)]
    head = ["", "H100, measured alone", *(f"{card}, in estimates" for card in cards)]
    return markdown(head, lines, f"{made_by([*ceilings.values(), *others.values()])}.")


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


def mixture_runs_table() -> str:
    """Whole runs on a mixture: seconds by stage and of one layer, and peaks, measured and predicted before the run."""
    rows = latest([row for row in rows_of("compress") if row["model"] == MIXTURE], "section")
    lines = []
    for row in rows:
        run = "whole experts" if "experts" in row["settings"] else f"neurons, {row['form']}"
        stages = [f"{row['seconds'][stage]:.1f}" if stage in row["seconds"] else "–" for stage in STAGES]
        peaks = (("peak_device_bytes", "device_bytes"), ("peak_bytes", "host_bytes"))
        memory = [f"{row[peak] / GIB:.1f} / {row['predicted'][bound] / GIB:.1f} GiB" for peak, bound in peaks]
        layer = f"{median(row['layer_seconds']):.1f}"
        in_all = f"**{row['wall_seconds']:.0f} s** / {row['predicted']['seconds']['total']:.0f} s"
        lines.append([run, row["commit"], *stages, layer, in_all, *memory])
    head = ["run", "commit", *STAGES, "one layer", "in all / predicted", "device / predicted", "host / predicted"]
    caption = f"Measured on an {_card(rows[0])}: 8 of the 48 layers of Qwen3-30B-A3B's shape with random weights, "
    caption += "393,216 tokens, `--sparsity 0.2 --batch-size 16`, bfloat16."
    return markdown(head, lines, caption)


STAGES = ("prepare", "curvature", "profile", "layers", "write")


def _card(row: Row) -> str:
    return row["device"].removeprefix("NVIDIA ").split()[0]


def gpu_first_run_table() -> str:
    """What the model of time says of the first commit that ran on a GPU, beside what was measured there."""
    rows = [row for row in read_rows("gpu_estimate") if "measured" in row]
    lines = []
    for row in rows:
        stages = [
            f"{sum(row['phases'].get(stage, {}).values()):.1f} / {row['measured'][stage]:.1f}"
            for stage in ("prepare", "layers", "write")
        ]
        total = [f"{row['total']:.1f} / {row['measured_total']:.1f} s", f"{row['total'] / row['measured_total']:.2f}"]
        lines.append([row["model"], row["run"], *stages, *total])
    head = ["model", "form", "prepare", "layers", "write", "in all", "ratio"]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return markdown(head, lines, f"Modelled / measured seconds of commit {commits} on the H100.")


def gpu_sketch_table() -> str:
    """CountSketch by torch and by Triton."""
    rows = latest(rows_of("sketch"), "kernels", "columns", "dtype")
    return _by_kernels(rows, ("torch", "triton"), "Seconds of a sketch of 2 n rows from 8,192 rows")


def gpu_pivots_table() -> str:
    """Ways of taking pivots: those of the experiment, and the package's own since then."""
    rows = [row for row in rows_of("pivots") if row["section"] == "by hand" and "seconds" in row]
    tried = {row["what"]: {one["n"]: one["seconds"] for one in rows if one["what"] == row["what"]} for row in rows}
    own = latest([row for row in rows_of("pivots") if row["section"] == "pivots"], "what", "columns", "rank", "kernels")
    taken = {
        f"`cholesky_pivots_`, {'Triton' if kernels == 'default' else 'torch'}": {
            row["columns"]: row["seconds"]
            for row in own
            if row.get("kernels") == kernels and row["rank"] == RANKS.get(row["columns"])
        }
        for kernels in ("default", "torch")
    }
    ways = {name: tried[way] for way, name in WAYS.items()} | {
        name: seconds for name, seconds in taken.items() if seconds
    }
    lines = [[name, *(f"{of[n]:.3g}" if n in of else "–" for n in RANKS)] for name, of in ways.items()]
    head = ["seconds", *(f"{rank:,} pivots of {n:,}" for n, rank in RANKS.items())]
    alike = all(row.get("equal", True) for row in [*rows, *own])
    note = "All chose the same pivots in the same order." if alike else "Not all chose the same pivots."
    return markdown(head, lines, f"{made_by([*rows, *own])}. {note}")


RANKS = {4096: 2816, 11008: 7552}
WAYS = {
    "eliminate_ now": "15 launches a pivot, commit 2449bf0",
    "torch kernels in a graph, width 64": "the same in a graph, experiment",
    "triton, launch a pivot, width 128": "Triton, a launch a pivot, experiment",
    "triton in a graph, width 128, tile 32": "Triton in a graph, experiment",
}


def _by_kernels(rows: Sequence[Row], names: Sequence[str], caption: str) -> str:
    cells: dict[tuple[int, str], dict[str, float]] = {}
    for row in rows:
        place = (row["columns"], row["dtype"].removeprefix("torch."))
        cells.setdefault(place, {})[row["kernels"]] = row["seconds"]
    lines = []
    for (columns, dtype), seconds in cells.items():
        times = [f"{seconds[name]:.3g}" if name in seconds else "–" for name in names]
        ratio = f"{seconds['torch'] / seconds['triton']:.2f}" if "triton" in seconds else "–"
        lines.append([f"{columns:,}", dtype, *times, ratio])
    return markdown(["n", "rows", *names, "torch ÷ triton"], lines, f"{caption}; {made_by(rows)}.")


NOT_YET = "Not measured yet."


def gpu_agree_table() -> str:
    """One compression on the CPU and on the card, in both dtypes and by both kinds of kernels."""
    rows = latest([row for row in rows_of("agree") if row["section"] == "agree"], "run")
    if not rows:
        return NOT_YET
    lines = [
        [
            row["run"],
            f"{row['same_neurons']:.2%}",
            f"{row['equal_tensors']:.0%}",
            f"{row['median_difference']:.1e}",
            f"{row['worst_difference']:.1e}",
            row["checksum"],
        ]
        for row in rows
    ]
    head = ["run", "same neurons", "equal tensors", "median difference", "largest difference", "SHA-256"]
    caption = "Beside the first run with the same settings; differences are relative, of a tensor."
    return markdown(head, lines, f"{caption} {made_by(rows)}.")


def gpu_speed_table() -> str:
    """Prefill and decoding of every form, eagerly, compiled and in a graph; the dense model's time ÷ the form's."""
    rows = [{"model": "SmolLM2-135M"} | row for row in rows_of("speed")]
    rows = latest(rows, "model", "form", "how", "sequences", "length", "decode_seconds")
    measures = [(row, name) for row in rows for name in ("prefill_seconds", "decode_seconds") if name in row]
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for row, name in measures:
        size = f"{row['sequences']} × {row['length']:,}"
        place = (row["model"], row["how"], name.removesuffix("_seconds"), size)
        found.setdefault(place, {})[row["form"]] = row[name]
    if not found:
        return NOT_YET
    forms = list(dict.fromkeys(row["form"] for row in rows if row["form"] != "dense"))
    lines = []
    for place, seconds in sorted(found.items(), key=lambda item: item[0][0] != "SmolLM2-135M"):
        faster = [f"{seconds['dense'] / seconds[form]:.2f} ×" if form in seconds else "–" for form in forms]
        lines.append([*place, f"{seconds['dense'] * 1000:.2f} ms", *faster])
    head = ["model", "how", "what", "sequences × tokens", "dense", *forms]
    caption = (
        "Times faster than the dense model, at −20 %, bfloat16. The 7B has random weights, and in the per-layer form "
        "the sizes of SmolLM2's at the same depth; *expanded*: linears whose rank saves little are whole (`expand_()`)"
    )
    return markdown(head, lines, f"{caption}; {made_by(rows)}.")
