"""Tables of other tools, from `results/other_tools.jsonl`: rows by hand, measured outside this repository."""

from statistics import geometric_mean

from harness import Row, read_rows
from judging import KINDS
from quality_rows import quality_rows

from tables.cells import markdown, rounded, score_cell, token_span
from tables.gpu_quality import rows_by_default

MODEL = "SmolLM2-135M"
WIKITEXT2 = "wikitext2_valid.txt"
SIZES = (0.1, 0.2, 0.3)
OWN_CODE = "its own code"
OWN_TEXT = ("general.jsonl+self", 131072)
ALONE = ("general.jsonl", 65536)  # the text and the tokens of the best other tools
CURVATURE = {"curvature": "fisher"}  # today's default in the per-layer form, which rows without settings are older than
SHOWN = 4  # the best on two texts, `oneshot` among them, so that the README's table stays small


def summary_table() -> str:
    """The README's table: the default in both forms on five texts, and beside other tools on two texts."""
    quality = default_curves()
    without = "per-layer without output curvature"
    curves = [
        ("per-layer", OWN_TEXT, quality["per-layer"]),
        ("per-layer", ALONE, default_rows("per-layer", *ALONE, CURVATURE)),
        ("stock", OWN_TEXT, quality["stock"]),
    ]
    lines = [["dense model", "–", *["1"] * len(SIZES)]]
    for form, (text, tokens), rows in curves:
        scores = {row["asked"]: score_cell(row) for row in rows}
        name = f"{_name('oneshot', form)}; {_with_own_text(text, f'{tokens:,}')}"
        lines.append([name, "five", *(scores.get(size, "–") for size in SIZES)])
    for tool, scores in list(other_curves().items())[:SHOWN]:
        shown = [
            row for row in _broad() if row["tool"] == tool and row["asked"] in SIZES and row.get("form") != "stock"
        ]
        tokens = token_span(row["calibration_tokens"] for row in shown if row["calibration_tokens"])
        lines.append(
            [f"{_name(tool, without)}; {_with_own_text(shown[0]['calibration'], tokens)}", "two", *_cells(scores)]
        )
    seeds = ", ".join(
        f"{form} {token_span(len(row.get('scores', [row])) for row in rows if row['asked'] in SIZES)}"
        for form, text, rows in curves
        if text == OWN_TEXT and rows
    )
    dense = quality_rows()[0]
    return markdown(
        [
            "method; tokens of calibration",
            "texts",
            *("10\N{NO-BREAK SPACE}%", "20\N{NO-BREAK SPACE}%", "30\N{NO-BREAK SPACE}%"),
        ],
        lines,
        "Perplexity ÷ the dense model's, geometric mean over the texts; lower is better. The columns are the removed "
        f"shares of the stored parameters of {dense['model']}, the embedding included. The five texts are "
        f"{', '.join(KINDS.values())}; ± is the standard deviation over seeds ({seeds}). The two texts are WikiText-2 "
        "and an English text of another kind. All calibrate on `general.jsonl`; “with own text”: half of the tokens "
        "are written by the model (`general.jsonl+self`). The lines of five texts are of a CPU, 4 windows "
        "of each text; the second is of older code. The rows of other tools are single "
        "runs of their own code, "
        "patched for this model; the best three are shown. The row of `oneshot` on two texts is one run on an "
        "H100, without output curvature.",
    )


def _with_own_text(calibration: str, tokens: str) -> str:
    return f"{tokens} with own text" if calibration.endswith("+self") else tokens


def default_rows(form: str, calibration: str, tokens: int, settings: dict[str, str]) -> list[Row]:
    """Rows of the default recipe in a form with settings, calibrated on so many tokens of a text, by size."""
    rows = [row for row in quality_rows() if row["recipe"] == "oneshot" and row["settings"] == settings]
    text = [row for row in rows if (row["calibration"], row["calibration_tokens"]) == (calibration, tokens)]
    return sorted((row for row in text if row["form"] == form), key=lambda row: row["asked"])


def default_curves() -> dict[str, list[Row]]:
    """Rows of the default recipe by form, with the model's own text."""
    return {
        "per-layer": sorted(rows_by_default(MODEL), key=lambda row: row["asked"]),
        "stock": default_rows("stock", *OWN_TEXT, {}),
    }


def other_curves() -> dict[str, dict[float, float]]:
    """Geometric means on two texts by tool and size, all on broad text; `oneshot` is the per-layer form."""
    curves: dict[str, dict[float, float]] = {}
    for row in _broad():
        if row["asked"] is not None and row.get("form") != "stock":
            curves.setdefault(row["tool"], {})[row["asked"]] = geometric_mean(row["ratio"].values())
    return dict(sorted(curves.items(), key=lambda item: item[1][SIZES[1]]))


def _broad() -> list[Row]:
    return [row for row in read_rows("other_tools") if row["calibration"] != WIKITEXT2]


def _name(tool: str, form: str | None) -> str:
    return f"**oneshot**, {form}" if tool == "oneshot" else f"{tool}, {OWN_CODE}"


def _cells(scores: dict[float, float]) -> list[str]:
    return [rounded(scores[size]) if size in scores else "–" for size in SIZES]


def _tokens(row: Row) -> str:
    tokens = row["calibration_tokens"]
    return row["calibration"] if tokens is None else f"{row['calibration']}, {tokens:,} tokens"
