"""Quality and speed of the same files: compressed models beside the dense one in transformers."""

from harness import Row, latest, read_rows

from tables.cells import markdown, origin, rounded

KEYS = ("form", "asked", "budget", "seed", "calibration_hash", "expanded")
CASE = ("device", "dtype", "threads", "mode", "batch", "length")


def speed_table() -> str:
    """Return a line for every result, with prefill and decoding ÷ the dense model's in every measured case."""
    rows = latest(read_rows("speed"), *KEYS, *CASE)
    cases = list(dict.fromkeys(_case(row) for row in rows))
    models: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        models.setdefault(tuple(str(row[key]) for key in KEYS), {})[_case(row)] = row
    lines = [_line(by_case, cases) for by_case in models.values()]
    header = ["form", "target", "parameters", "file", "score", *cases]
    calibration = {f"{row['calibration_tokens']:,} tokens of {row['calibration']}" for row in rows}
    return markdown(
        header,
        sorted(lines),
        "Seconds of prefill · of a decoded token in transformers, ÷ the dense model's: minima over rounds in which all "
        "models take turns. Parameters and file ÷ the dense model's and in MB. The score is the perplexity ÷ the dense "
        f"model's, geometric mean over five kinds of text, of the same files. Calibration: "
        f"{', '.join(sorted(calibration))}; {origin(rows)}.",
    )


def _line(by_case: dict[str, Row], cases: list[str]) -> list[str]:
    row = next(iter(by_case.values()))
    scored = [one["score"] for one in by_case.values() if "score" in one]
    cells = [
        f"{by_case[case]['prefill_ratio']:.2f} · {by_case[case]['decode_ratio']:.2f}" if case in by_case else "–"
        for case in cases
    ]
    expanded = "" if row["expanded"] is None else f", expanded above {row['expanded']}"
    return [
        row["form"] + expanded,
        f"−{row['asked']:.0%} {row['budget']}",
        f"{row['stored_parameters'] / row['dense_parameters']:.2f}",
        f"{row['file_bytes'] / 1e6:.0f}",
        rounded(scored[-1]) if scored else "–",
        *cells,
    ]


def _case(row: Row) -> str:
    """Return a column's title."""
    place = "CPU" if row["place"] == "cpu" else row["device"]
    return f"{place}, {row['dtype']}, {row['mode']}, {row['batch']} × {row['length']}"
