"""Tables of quantised files in llama.cpp: size, loss and speed, dense and compressed."""

from collections.abc import Iterator
from statistics import median

from harness import Row, latest, read_rows
from judging import score

from tables.cells import markdown, origin

KEYS = ("series", "asked", "type")
MEASURES = {"file size": "file_bytes", "prefill": "prefill_ratio", "decoding": "decode_ratio"}
NOTICEABLE = 0.95  # of two files of nearly equal size or speed, the one of less loss is enough; speeds vary so much


def pareto_rows() -> list[Row]:
    """Return the newest row of every file, with its `score`, and `prefill` and `decode` if measured.

    All rows have the windows of the newest row of the dense model in F16. It comes first.
    """
    rows = latest(read_rows("pareto"), *KEYS)
    dense = [row for row in rows if row["series"] == "dense" and row["type"] == "F16"]
    if not dense:
        return []
    speeds = _speeds(read_rows("pareto_speed"))
    judged = [row for row in rows if all(row[name] == dense[0][name] for name in ("windows", "context", "texts"))]
    judged = [
        row | {"score": score(row["perplexity"], dense[0]["perplexity"])["score"]} | speeds.get(_key(row), {})
        for row in judged
    ]
    order = list(dict.fromkeys(row["series"] for row in judged))
    types = list(dict.fromkeys(row["type"] for row in judged))
    return sorted(judged, key=lambda row: (order.index(row["series"]), row["asked"], types.index(row["type"])))


def _key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEYS)


def _speeds(rows: list[Row]) -> dict[tuple[str, ...], Row]:
    """Return each file's medians of tokens per second, and of their ratios to the dense F16 file just before."""
    rounds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        rounds.setdefault(_key(row), []).append(row)
    found: dict[tuple[str, ...], Row] = {key: {} for key in rounds}
    for name in ("prefill", "decode"):
        dense = median(row["dense"][name] for row in rows) if rows else 1.0
        for key, measured in rounds.items():
            found[key][name] = median(row[name] for row in measured)
            found[key][f"{name}_ratio"] = median(row[name] / row["dense"][name] for row in measured)
            if key == ("dense", "0.0", "F16"):
                found[key] |= {name: dense, f"{name}_ratio": 1.0}
    return found


def model_name(row: Row) -> str:
    """Return the name of a row's model for people."""
    return "dense" if row["series"] == "dense" else f"{row['series']}, −{row['asked']:.0%}"


def by_model(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Return the rows by model and type."""
    models: dict[str, dict[str, Row]] = {}
    for row in rows:
        models.setdefault(model_name(row), {})[row["type"]] = row
    return models


def _matrix(cell: str, caption: str) -> str:
    """Return a table of models by types; `cell` is a format of a row's fields."""
    rows = pareto_rows()
    types = list(dict.fromkeys(row["type"] for row in rows))
    lines = []
    for name, files in by_model(rows).items():
        size = f"{next(iter(files.values()))['stored_parameters'] / 1e6:.1f} M"
        shown = [files.get(kind) for kind in types]
        cells = ["–" if row is None or "score" not in row else _cell(cell, row) for row in shown]
        lines.append([name, size, *cells])
    return markdown(["model", "parameters", *types], lines, caption)


def _cell(cell: str, row: Row) -> str:
    if "prefill" in cell and "prefill" not in row:
        return "–"
    megabytes, bits = row["file_bytes"] / 1e6, 8 * sum(row["tensor_bytes"].values()) / row["stored_parameters"]
    return cell.format(**row, megabytes=megabytes, bits=bits)


def _setting() -> str:
    """Return what the rows have in common, for captions."""
    rows = pareto_rows()
    texts = {
        f"Compressed on {row['calibration_tokens']:,} tokens of {row['calibration']}; "
        for row in rows[1:]
        if row["asked"]
    }
    version = rows[0]["llama_cpp"].removeprefix("version: ")
    return f"{''.join(sorted(texts))}{rows[0]['model']}, llama.cpp {version}; {origin(rows)}"


def pareto_table() -> str:
    """Return file size and score of every model in every type."""
    dense = pareto_rows()[0]
    return _matrix(
        "{megabytes:.0f} MB, {score:.2f}",
        f"File size, and perplexity ÷ the dense model's in F16: geometric mean over five kinds of text, second halves "
        f"of the first {dense['windows']} windows of {dense['context']} tokens of each; no importance matrix. "
        f"{_setting()}.",
    )


def frontier(rows: list[Row], measure: str) -> Iterator[Row]:
    """Yield the files that no other file beats, from the least loss on.

    A later file has noticeably fewer bytes, or noticeably more tokens per second, than all before it.
    """
    best: float | None = None
    for row in sorted((row for row in rows if measure in row), key=lambda row: float(row["score"])):
        cost = row[measure] if measure == "file_bytes" else 1 / row[measure]
        if best is None or cost < NOTICEABLE * best:
            best = cost
            yield row


def pareto_frontier_table() -> str:
    """Return the files that no other beats, by size, by prefill and by decoding."""
    rows = pareto_rows()
    lines = []
    for title, measure in MEASURES.items():
        files = [
            f"{model_name(row)}, {row['type']} ({_amount(row, measure)}, {row['score']:.2f})"
            for row in frontier(rows, measure)
        ]
        lines.append([title, " → ".join(files) or "not measured"])
    return markdown(
        ["counts", "files that no other beats (amount, score), from the least loss on"],
        lines,
        "A file is named if every file of less loss is at least 5% larger or slower. Compressed models are named "
        "by their form, `gguf` (own FFN widths by layer, whole linears and embedding) or `stock`; each file is one "
        "point of the plot. The score is the perplexity ÷ dense F16's. " + _setting() + ".",
    )


def _amount(row: Row, measure: str) -> str:
    return f"{row[measure] / 1e6:.0f} MB" if measure == "file_bytes" else f"{row[measure]:.2f} ×"
