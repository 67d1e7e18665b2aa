"""Tables of what runs take and survive: time, memory, faults, processes."""

from statistics import fmean

from harness import Row, key_of, latest, read_rows

from tables.cells import markdown, origin

LITTLE_TOKENS = 4096  # with which people try a tool first


def overhead_table() -> str:
    rows = [{"form": "stock", "little": row["num_tokens"] <= LITTLE_TOKENS} | row for row in read_rows("overhead")]
    rows = latest(rows, "recipe", "form", "little")
    lines = []
    for row in rows:
        seconds = [f"{fmean(row[name]):.0f} s" for name in ("forward_seconds", "whole_forward_seconds")]
        ratios = [f"{row[name]:.2f}" for name in ("ratio", "whole_ratio")]
        total, profile = row["compress_seconds"]["total"], row["compress_seconds"].get("profile")
        taken = f"{row.get('compress_cpu_seconds', total):.0f} s"
        if profile is None:
            ratios.append("–")
        else:
            taken += f" ({profile / total:.0%} of it the profile)"
            ratios.append(f"{row['whole_ratio'] * (1 - profile / total):.2f}")
        lines.append([row["recipe"], row["form"], f"{row['num_tokens']:,}", *seconds, taken, *ratios, _operators(row)])
    return markdown(
        [
            *("recipe", "form", "tokens", "dense pass, no head", "dense pass"),
            *("compression", "÷ pass, no head", "÷ pass", "÷ pass, with a ready profile", "costliest operators"),
        ],
        lines,
        "CPU seconds of one thread; rows older than this measure have seconds of the wall clock. "
        f"{rows[0]['model']}, {origin(rows)}.",
    )


def _operators(row: Row) -> str:
    """The four operators that took longest, where the row has been to the profiler."""
    if row["operator_seconds"] is None:
        return "–"
    total = sum(row["operator_seconds"].values())
    first = list(row["operator_seconds"].items())[:4]
    return ", ".join(f"`{name.removeprefix('aten::')}` {seconds / total:.0%}" for name, seconds in first)


def memory_table() -> str:
    """Peak memory by model: predicted, allowed and measured."""
    rows = [row for row in read_rows("memory") if "predicted_bytes" in row]
    if not rows:
        return "Not measured yet."
    # older rows have the store in the place of the form
    rows = [row if "store" in row else row | {"store": row["form"], "form": "stock"} for row in rows]
    rows = sorted(latest(rows, "model", "recipe", "form"), key=lambda row: row["measured_bytes"])
    sizes = ("weight_bytes", "predicted_bytes", "max_memory_bytes", "measured_bytes")
    return markdown(
        [
            "model",
            "form",
            "tokens",
            "weights",
            "predicted peak",
            "`--max-memory`",
            "measured peak",
            "÷ predicted",
            "activations",
        ],
        [
            [
                row["model"],
                row["form"],
                f"{row['num_tokens']:,}",
                *(f"{row[size] / 1e9:.2f} GB" for size in sizes),
                f"{row['ratio']:.2f}",
                f"on the {row['store']}",
            ]
            for row in rows
        ],
        f"Recipe {rows[0]['recipe']}, resident memory of the whole process, libraries included (0.46 GB before the "
        f"first tensor); {origin(rows)}.",
    )


def processes_counted_table() -> str:
    """Return CPU seconds of the process that all others wait for, by stage, and what all of them compute together."""
    rows = latest(read_rows("processes_counted"), "layers", "form", "num_tokens", "own_text", "processes")
    rows.sort(key=lambda row: (row["num_tokens"], row["processes"]))
    stages = list(dict.fromkeys(stage for row in rows for stage in row["stages"]))
    lines = [
        [
            "all" if row["layers"] is None else f"first {row['layers']}",
            f"{row['num_tokens']:,}" + (", half written by the model" if row["own_text"] else ""),
            str(row["processes"]),
            *(f"{row['stages'].get(stage, 0):.1f}" for stage in stages),
            f"{row['seconds']:.1f}",
            f"{row['all_seconds']:.1f}",
        ]
        for row in rows
    ]
    return markdown(
        ["layers", "tokens", "processes", *stages, "all stages", "computed by all together"],
        lines,
        "CPU seconds between two exchanges of the process that needs most, added up: what the run would take if each "
        "process had a core of its own and exchanges took no time. What all compute together includes what each of "
        f"them repeats, such as reading layers. SmolLM2-135M-Instruct, per-layer, −20%, {origin(rows)}.",
    )


def peers_seconds_table() -> str:
    """Return the CPU seconds and the memory of other tools' own code beside ours, in dense passes over the text."""
    runs = peers_runs()
    newest = [rows[-1] for rows in runs]
    lines = [
        [
            row["model"],
            f"**{row['tool']}**" if row["tool"] == "oneshot" else row["tool"],
            row["method"],
            f"{row['num_tokens']:,}",
            f"{row['removed']:.1%}",
            f"{fmean(one['cpu_seconds'] for one in rows):.0f} s",
            f"{passes(rows):.1f}",
            ", ".join(f"{one['ratio']:.1f}" for one in rows),
            f"{max(one['peak_bytes'] for one in rows) / 1e9:.2f} GB",
        ]
        for row, rows in zip(newest, runs, strict=True)
    ]
    sources = {
        row["tool"]: f"{row['source']}, transformers {row['tool_versions']['transformers']}"
        + ("" if row["patched"] == "–" else f" (patched: {row['patched']})")
        for row in newest
        if row["tool"] != "oneshot"
    }
    return markdown(
        ["model", "tool", "what goes", "tokens", "removed", "run", "÷ dense pass", "each", "peak memory"],
        lines,
        "Text of builtin for all, one thread; CPU seconds of processes that read a "
        "folder and write one. The dense pass (float32, logits of all tokens) ran in the same environment. The ratio "
        "leaves out the imports of torch and transformers. Other tools computed in float32; ours took bfloat16 by "
        "`--dtype auto` where no dtype is named, and ends with a check on held-out text. "
        f"{'; '.join(f'{tool}: {source}' for tool, source in sources.items())}. "
        f"{origin([row for rows in runs for row in rows])}.",
    )


def peers_runs() -> list[list[Row]]:
    """Return the rows of each run of `peers.py` at its newest commit: model by model, other tools before ours."""
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in read_rows("peers_seconds"):
        runs.setdefault(key_of(row, "model", "tool", "method", "num_tokens"), []).append(row)
    order = list(dict.fromkeys(model for model, *_ in runs))
    newest = [[row for row in rows if row["commit"] == rows[-1]["commit"]] for rows in runs.values()]
    return sorted(newest, key=lambda rows: (order.index(rows[0]["model"]), rows[0]["tool"] == "oneshot"))


def passes(rows: list[Row]) -> float:
    """Return the dense passes of a run of `peers.py`, the mean over its turns."""
    return fmean(row["ratio"] for row in rows)
