"""Tables of what runs take and survive (time, memory, faults, processes), and of results in llama.cpp."""

from statistics import fmean

from harness import Row, latest, read_rows

from tables.cells import markdown, origin


def overhead_table() -> str:
    rows = latest([{"form": "stock"} | row for row in read_rows("overhead")], "recipe", "form")
    lines = []
    for row in rows:
        seconds = [f"{fmean(row[name]):.0f} s" for name in ("forward_seconds", "whole_forward_seconds")]
        ratios = [f"{row[name]:.2f}" for name in ("ratio", "whole_ratio")]
        total, profile = row["compress_seconds"]["total"], row["compress_seconds"].get("profile")
        taken = f"{total:.0f} s" if profile is None else f"{total:.0f} s ({profile:.0f} s of it the profile)"
        lines.append([row["recipe"], row["form"], f"{row['num_tokens']:,}", *seconds, taken, *ratios, _operators(row)])
    return markdown(
        [
            *("recipe", "form", "tokens", "dense pass, no head", "dense pass"),
            *("compression", "÷ pass, no head", "÷ pass", "costliest operators"),
        ],
        lines,
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
    rows = sorted(latest(rows, "model", "recipe"), key=lambda row: row["measured_bytes"])
    sizes = ("weight_bytes", "predicted_bytes", "max_memory_bytes", "measured_bytes")
    return markdown(
        [
            "model",
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
                f"{row['num_tokens']:,}",
                *(f"{row[size] / 1e9:.2f} GB" for size in sizes),
                f"{row['ratio']:.2f}",
                f"on the {row.get('store') or row['form']}",
            ]
            for row in rows
        ],
        f"Recipe {rows[0]['recipe']}, resident memory of the whole process, libraries included (0.46 GB before the "
        f"first tensor); {origin(rows)}.",
    )


def faults_table() -> str:
    """Faults injected, survived and lost."""
    rows = latest(read_rows("faults"), "fault")
    lines = [[row["fault"], *(str(row[name]) for name in ("injected", "survived", "lost"))] for row in rows]
    total = [f"**{sum(row[name] for row in rows)}**" for name in ("injected", "survived", "lost")]
    return markdown(
        ["fault", "injected", "survived", "lost"],
        [*lines, ["**all**", *total]],
        f"{rows[0]['model']}, {rows[0]['num_tokens']:,} tokens; an undisturbed run took "
        f"{rows[0]['undisturbed_seconds']:.0f} s; {origin(rows)}.",
    )


def kills_table() -> str:
    """Return the kills at random moments of small runs, by the kind of run."""
    rows = latest(read_rows("kills"), "kind")
    names = ("injected", "outputs", "equal")
    lines = [[row["kind"], *(str(row[name]) for name in names)] for row in rows]
    total = [f"**{sum(row[name] for row in rows)}**" for name in names]
    return markdown(
        ["run", "kills", "finished outputs", "equal to an undisturbed run"],
        [*lines, ["**all**", *total]],
        f"{rows[0]['model']}; {origin(rows)}.",
    )


def processes_table() -> str:
    """Several processes beside one, for each text."""
    rows = latest([row for row in read_rows("processes") if "same_bytes" in row], "text", "processes")
    lines = [
        [
            row["text"],
            f"{row['num_tokens']:,}",
            str(row["processes"]),
            "yes" if row["same_bytes"] else "no",
            f"{row['one_seconds']:.0f} s",
            f"{row['seconds']:.0f} s",
        ]
        for row in rows
    ]
    return markdown(
        ["text", "tokens", "processes", "same bytes as one", "one process", "so many processes"],
        lines,
        f"{rows[0]['model']}, from start to end of the command; {origin(rows)}.",
    )


def quantising_sentences() -> str:
    """Return file size and perplexity of the quantised, the compressed and the quantised compressed model."""
    dense, compressed = _llama_cpp_rows()
    plain, small = "F32", "Q4_K_M"

    def costs(row: Row, kind: str) -> str:
        ratio = row["types"][kind]["perplexity"] / dense["types"][plain]["perplexity"]
        return f"{row['types'][kind]['file_bytes'] / 1e6:.0f} MB at {ratio:.2f} × the perplexity"

    whole = dense["types"][plain]["file_bytes"] / 1e6
    removed = 1 - compressed["stored_parameters"] / dense["stored_parameters"]
    return (
        f"For example, {dense['model']} in llama.cpp: type {small} shrinks the file from {whole:.0f} MB ({plain}) to "
        f"{costs(dense, small)}. Removing {removed:.0%} "
        f"of the parameters gives {costs(compressed, plain)}. Both together give {costs(compressed, small)}. The "
        f"compressed model was calibrated on {compressed['calibration_tokens']:,} tokens, a quarter of the default."
    )


def _llama_cpp_rows() -> tuple[Row, Row]:
    """Return the newest rows of the dense and the compressed model."""
    dense, compressed = sorted(latest(read_rows("llama_cpp"), "dense"), key=lambda row: not row["dense"])
    return dense, compressed


def llama_cpp_table() -> str:
    """Perplexity and file size of the dense and the compressed model in llama.cpp, beside transformers."""
    dense, compressed = _llama_cpp_rows()
    lines = []
    for row in (dense, compressed):
        cells = [f"{found['perplexity']:.2f} ({found['file_bytes'] / 1e6:.0f} MB)" for found in row["types"].values()]
        name = "dense" if row["dense"] else "compressed"
        lines.append([name, f"{row['stored_parameters'] / 1e6:.1f} M", f"{row['transformers_perplexity']:.2f}", *cells])
    return markdown(
        ["model", "stored parameters", "transformers, fp32", *(f"llama.cpp, {kind}" for kind in dense["types"])],
        lines,
        f"Perplexity on the second halves of the first {dense['chunks']} chunks of {dense['context']} tokens of "
        f"WikiText-2's test text, and file sizes; compressed on {compressed['calibration_tokens']:,} tokens of "
        f"{compressed['calibration']}; {dense['model']}, llama.cpp {dense['llama_cpp'].removeprefix('version: ')}; "
        f"{origin([dense, compressed])}.",
    )
