"""Compressed models in vLLM: the plugin and the Transformers backend beside the dense model."""

from harness import Row, latest, read_rows

from tables.cells import markdown, origin, settings
from tables.speed import ARTEFACT

CASE = ("quantised", "implementation", "place", "device", "dtype", "mode", "batch", "length")
NAMES = {"vllm": "the plugin", "transformers": "the Transformers backend"}


def serve_speed_table() -> str:
    """Return a line for every file and way to open it, with prefill and decoding in every measured case."""
    keys = [key for key in ARTEFACT if key != "expanded"]
    rows = latest(read_rows("serve_speed"), *keys, *CASE)
    columns = list(dict.fromkeys(_column(row) for row in rows))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        found = lines.setdefault((_file(row), NAMES[row["implementation"]]), {})
        found[_column(row)] = f"{row['prefill_ratio']:.2f} · {row['decode_ratio']:.2f}"
    noise = max(max(row["prefill_ratios_by_round"]) / min(row["prefill_ratios_by_round"]) for row in rows)
    return markdown(
        ["file", "opened by", *columns],
        [[*names, *(found.get(column, "–") for column in columns)] for names, found in lines.items()],
        "Seconds of prefill · of a step of decoding in vLLM, ÷ the dense model's by vLLM's own class; batch × prompt "
        "tokens. Minima over rounds in which all models take turns. The machine is shared: a ratio of prefill differs "
        f"between rounds by up to {noise - 1:.0%}. {', '.join(sorted({row['model'] for row in rows}))}, "
        f"vLLM {', '.join(sorted({row['vllm'] for row in rows}))}; {origin(rows)}.",
    )


def _file(row: Row) -> str:
    budget = "" if row["budget"] == "parameters" else f" of {row['budget']}"
    parts = [f"{row['form']}, −{row['asked']:.0%}{budget}", settings(row)]
    if row.get("quantised"):
        parts.append(f"{row['quantised'].upper()}, beside the dense one in {row['dense_quantised'].upper()}")
    return ", ".join(filter(None, parts))


def _column(row: Row) -> str:
    place = "CPU" if row["place"] == "cpu" else row["device"]
    return f"{place}, {row['dtype']}, {row['mode']}, {row['batch']} × {row['length']}"
