"""Tables of other tools, from `results/other_tools.jsonl`: rows by hand, measured outside this repository."""

from statistics import geometric_mean

from harness import Row, read_rows
from judging import KINDS
from quality_rows import quality_rows

from tables.cells import markdown, rounded, score_cell, token_span

WIKITEXT2 = "wikitext2_valid.txt"
SIZES = (0.1, 0.2, 0.3)
OWN_CODE = "its own code"
SHOWN = 5  # the best on two texts, `oneshot` among them, so that the README's table stays small


def summary_table() -> str:
    """The README's table: the default in both forms on five texts, and beside other tools on two texts."""
    quality = default_curves()
    lines = [["dense model", "–", *["1"] * len(SIZES)]]
    for form in ("per-layer", "stock"):
        scores = {row["asked"]: score_cell(row) for row in quality[form]}
        lines.append([f"**oneshot**, {form}", "five", *(scores.get(size, "–") for size in SIZES)])
    for tool, scores in list(other_curves().items())[:SHOWN]:
        lines.append([_name(tool, "per-layer"), "two", *_cells(scores)])
    shown = {form: [row for row in rows if row["asked"] in SIZES] for form, rows in quality.items()}
    seeds = ", ".join(
        f"{form} {token_span(len(row.get('scores', [row])) for row in rows)}" for form, rows in shown.items() if rows
    )
    dense = quality_rows()[0]
    return markdown(
        ["method", "texts", "10\N{NO-BREAK SPACE}%", "20\N{NO-BREAK SPACE}%", "30\N{NO-BREAK SPACE}%"],
        lines,
        "Perplexity ÷ the dense model's, geometric mean over the texts; lower is better. The columns are the removed "
        f"shares of the stored parameters of {dense['model']}, the embedding included. The five texts are "
        f"{', '.join(KINDS.values())}; ± is the standard deviation over seeds ({seeds}). The two texts are WikiText-2 "
        "and an English text of another kind. `oneshot` "
        "calibrates on `general.jsonl+self`, the other tools on `general.jsonl`. Their rows are single runs of their "
        "own code, patched for this model. The row of `oneshot` on two texts is one run on an "
        "H100; the best four of the other tools are shown.",
    )


def default_curves() -> dict[str, list[Row]]:
    """Rows of the default recipe by form, with the model's own text."""
    rows = [row for row in quality_rows() if row["recipe"] == "oneshot" and not row["settings"]]
    rows = sorted((row for row in rows if row["calibration"] == "general.jsonl+self"), key=lambda row: row["asked"])
    return {form: [row for row in rows if row["form"] == form] for form in ("per-layer", "stock")}


def other_curves() -> dict[str, dict[float, float]]:
    """Geometric means on two texts by tool and size, all on broad text; `oneshot` is the per-layer form."""
    curves: dict[str, dict[float, float]] = {}
    for row in _broad():
        if row["asked"] is not None and row.get("form") != "stock":
            curves.setdefault(row["tool"], {})[row["asked"]] = geometric_mean(row["ratio"].values())
    return dict(sorted(curves.items(), key=lambda item: item[1][SIZES[1]]))


def broad_tools_table() -> str:
    """Every tool calibrated on broad text, with both ratios, calibration and settings."""
    lines = [
        [
            _name(row["tool"], row.get("form")),
            f"{row['stored_removed']:.1%}",
            *(f"{row['ratio'][text]:.2f}" for text in ("wikitext2", "other")),
            f"{geometric_mean(row['ratio'].values()):.2f}",
            _tokens(row),
            row["settings"],
        ]
        for row in sorted(_broad(), key=lambda row: (row["tool"] != "oneshot", row["tool"], row["stored_removed"]))
    ]
    return markdown(
        ["method", "stored removed", "WikiText-2", "other text", "geometric mean", "calibration", "settings"],
        lines,
        "Perplexity ÷ dense in bf16, on the first 16 windows of WikiText-2's test text and of an English text of "
        "another kind (dense: 19.90 and 40.34). MPIFA and the stock form were read on 32 windows of WikiText-2. "
        f"Measured on {_dates(_broad())} outside this repository, one run each, on two shared CPU cores; the "
        "per-layer form on an H100. “Its own code” is the "
        "authors' code, patched for the CPU and for grouped queries.",
    )


def narrow_tools_table() -> str:
    """Every tool calibrated on WikiText-2, on WikiText-2's test text and, if known, on another text."""
    rows = [row for row in read_rows("other_tools") if row["calibration"] == WIKITEXT2]
    lines = [
        [
            _name(row["tool"], row.get("form")),
            f"{row['stored_removed']:.1%}",
            f"{row['ratio']['wikitext2']:.2f}",
            f"{row['ratio']['other']:.2f}" if "other" in row["ratio"] else "–",
            f"{row['calibration_tokens']:,}",
            row["settings"],
        ]
        for row in sorted(rows, key=lambda row: (row["tool"] != "oneshot", row["tool"], row["stored_removed"]))
    ]
    return markdown(
        ["method", "stored removed", "WikiText-2", "other text", "tokens", "settings"],
        lines,
        "Perplexity ÷ dense on the first 38 windows of WikiText-2's test text (dense: 20.22) and on an English text of "
        "another kind; bf16, `oneshot` in fp32. Measured on "
        f"{_dates(rows)} outside this repository, one run each. A negative share: the stored model grows.",
    )


def _broad() -> list[Row]:
    return [row for row in read_rows("other_tools") if row["calibration"] != WIKITEXT2]


def _name(tool: str, form: str | None) -> str:
    return f"**oneshot**, {form}" if tool == "oneshot" else f"{tool}, {OWN_CODE}"


def _cells(scores: dict[float, float]) -> list[str]:
    return [rounded(scores[size]) if size in scores else "–" for size in SIZES]


def _tokens(row: Row) -> str:
    tokens = row["calibration_tokens"]
    return row["calibration"] if tokens is None else f"{row['calibration']}, {tokens:,} tokens"


def _dates(rows: list[Row]) -> str:
    return " and ".join(sorted({row["date"] for row in rows}))
