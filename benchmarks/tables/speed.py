"""Quality and speed of the same files: compressed models beside the dense one in transformers."""

from collections.abc import Callable

from harness import Row, key_of, latest, read_rows

from tables.cells import markdown, origin, rounded, settings

NAME = ("model", "form", "asked", "budget", "settings", "seed")  # a newer file of the same name replaces the older one
FILE = (*NAME, "calibration_hash")
ARTEFACT = (*FILE, "expanded", "laid_out")
CASE = ("place", "device", "dtype", "mode", "batch", "length")


def every_speed_table() -> str:
    """Return the same files in every measured case."""
    return _table(
        newest_rows(),
        lambda row: f"{_place(row)}, {row['dtype']}, {row['mode']}, {row['batch']} × {row['length']}",
        "Prefill · decoding of a token in transformers (mode, batch × length)",
    )


def newest_rows() -> list[Row]:
    """Return the newest row of every file and case, by form and size, each with the score of its file."""
    every = read_rows("speed")
    scores = {key_of(row, *FILE): {"score": row["score"]} for row in every if "score" in row}
    newest = {key_of(row, *NAME): key_of(row, *FILE) for row in every}
    shown = [row for row in latest(every, *ARTEFACT, *CASE) if key_of(row, *FILE) == newest[key_of(row, *NAME)]]
    rows = [row | scores.get(key_of(row, *FILE), {}) for row in shown]
    return sorted(rows, key=lambda row: (row["form"], row["budget"], row["asked"], str(row["settings"]), row["seed"]))


def _table(rows: list[Row], column: Callable[[Row], str], what: str) -> str:
    """Return a line for every file; all cells of a line are of that one file."""
    files: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        files.setdefault(tuple(str(row[key]) for key in ARTEFACT), {})[column(row)] = row
    columns = list(dict.fromkeys(column(row) for row in sorted(rows, key=lambda row: (row["batch"], row["length"]))))
    calibration = sorted({f"{row['calibration_tokens']:,} tokens of {row['calibration']}" for row in rows})
    return markdown(
        ["file", "score", "parameters", "MB", *columns],
        [[*_file(next(iter(cases.values()))), *_ratios(cases, columns)] for cases in files.values()],
        f"{what}: seconds ÷ the dense model's, minima over rounds in which all models take turns. A line is one file, "
        "and its score is of the same file: perplexity ÷ the dense model's, geometric mean over five kinds of text. "
        f"Parameters are stored ones ÷ the dense model's. {', '.join(sorted({row['model'] for row in rows}))}, "
        f"{', '.join(calibration)}; {origin(rows)}.",
    )


def _file(row: Row) -> list[str]:
    """Return the cells of a file: its name, score and size."""
    more = [words for words in (settings(row), _expanded(row), _laid_out(row), row.get("note", "")) if words]
    budget = "" if row["budget"] == "parameters" else f" of {row['budget']}"
    return [
        ", ".join([f"{row['form']}, −{row['asked']:.0%}{budget}", *more]),
        rounded(row["score"]) if "score" in row else "–",
        f"{row['stored_parameters'] / row['dense_parameters']:.2f}",
        f"{row['file_bytes'] / 1e6:.0f}{' in float32' if row['file_bytes'] > 3 * row['stored_parameters'] else ''}",
    ]


def _expanded(row: Row) -> str:
    return "" if row["expanded"] is None else f"`expand_({row['expanded']})`"


def _laid_out(row: Row) -> str:
    return "`lay_out_()`" if row["laid_out"] else ""


def _ratios(cases: dict[str, Row], columns: list[str]) -> list[str]:
    return [
        f"{cases[name]['prefill_ratio']:.2f} · {cases[name]['decode_ratio']:.2f}" if name in cases else "–"
        for name in columns
    ]


def _place(row: Row) -> str:
    return "CPU" if row["place"] == "cpu" else str(row["device"])
