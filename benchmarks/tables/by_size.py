"""Table of the loss by the size of a model: a power law through two measured models, and what it predicts of others."""

import math
from collections.abc import Callable
from functools import partial

from harness import Row, read_rows

from tables.cells import markdown
from tables.gpu_measured import rows_of
from tables.gpu_quality import TOKENS, rows_at_equal_tokens
from tables.other_tools import default_curves

SMALL, LARGE = "SmolLM2-135M", "Qwen2.5-Coder-0.5B"
MEASURED = {SMALL: 134.5e6, LARGE: 494.0e6}  # stored parameters
WIDTHS = {SMALL: 1536, LARGE: 4864}  # of FFNs
FEW = (32_768, 65_536)  # tokens of calibration
PREDICTED = {"1.5B": 1.54e9, "7B": 7.6e9}
SIZES = (0.1, 0.2, 0.3)


def by_size_table() -> str:
    """Return the scores of two models by form and removed share, the exponent between them, and predicted scores."""
    stock = {row["asked"]: row for row in default_curves()["stock"]}
    lines = []
    measured: dict[str, tuple[Callable[[float], Row], ...]] = {  # of the small model and of the large one
        "per-layer": (partial(_per_layer, SMALL), partial(_per_layer, LARGE)),
        "stock": (stock.__getitem__, _stock_of_coder),
    }
    for form, models in measured.items():
        for size in SIZES:
            lines.append(_line(form, size, *(math.log(row_of(size)["score"]) for row_of in models)))
    lines.append(_by_equal_tokens())
    gemma = _gemma()
    return markdown(
        ["form", "removed", SMALL, LARGE, "exponent", *(f"{name}, predicted" for name in PREDICTED)],
        lines,
        "Score: perplexity ÷ dense, geometric mean over five kinds of text; all rows are of older code. "
        "The logarithm of the score falls as "
        "parameters to the power of −exponent. **Predicted from two models alone, of different makers and with equal "
        "tokens of calibration (131,072), so with fewer for each neuron of the larger one**: how far off such a line "
        f"can be is seen on Gemma 3 270M, per-layer −20 %, where it says {gemma[0]:.2f} and {gemma[1]:.2f} was "
        "measured. The coder's stock rows calibrate on general.jsonl alone. In the last line both models do, with "
        f"{TOKENS / WIDTHS[LARGE]:.0f} tokens for each neuron of an FFN; the smaller one's score is interpolated "
        f"between {FEW[0]:,} and {FEW[1]:,} tokens.",
    )


def _line(form: str, removed: float, small: float, large: float) -> list[str]:
    """Return a line of the table, from the logarithms of both scores."""
    exponent = -math.log(large / small) / math.log(MEASURED[LARGE] / MEASURED[SMALL])
    scores = [math.exp(large * (MEASURED[LARGE] / size) ** exponent) for size in PREDICTED.values()]
    line = [form, f"{removed:.0%}", f"{math.exp(small):.3f}", f"{math.exp(large):.3f}", f"{exponent:.2f}"]
    return line + [f"*{score:.2f}*" for score in scores]


def _by_equal_tokens() -> list[str]:
    """Return the line of the stock form with equally many tokens for each neuron of both models."""
    wanted = {"recipe": "oneshot", "form": "stock", "asked": 0.2, "settings": {}, "calibration": "general.jsonl"}
    wanted |= {"seed": 0, "max_windows": 4}
    rows = {row["calibration_tokens"]: row for row in read_rows("quality") if wanted.items() <= row.items()}
    few, many = (math.log(rows[tokens]["score"]) for tokens in FEW)
    share = math.log(TOKENS * WIDTHS[SMALL] / WIDTHS[LARGE] / FEW[0]) / math.log(FEW[1] / FEW[0])
    return _line(
        "stock, equal tokens for each neuron", 0.2, few + share * (many - few), math.log(_stock_of_coder(0.2)["score"])
    )


def _per_layer(model: str, size: float) -> Row:
    [row] = (row for row in rows_at_equal_tokens() if (row["model"], row["asked"]) == (model, size))
    return row


def _stock_of_coder(size: float) -> Row:
    wanted = {"section": "quality, coder, stock", "recipe": "oneshot", "asked": size}
    return [row for row in rows_of("quality") if wanted.items() <= row.items()][-1]


def _gemma() -> tuple[float, float]:
    """Return the score of Gemma 3 270M by the line through both models, and as measured."""
    dense = [row for row in read_rows("models") if (row["model"], row["recipe"]) == ("gemma-3-270m", "dense")]
    parameters = dense[-1]["stored_parameters"]
    small, large = (math.log(_per_layer(name, 0.2)["score"]) for name in MEASURED)
    share = math.log(parameters / MEASURED[SMALL]) / math.log(MEASURED[LARGE] / MEASURED[SMALL])
    return math.exp(small ** (1 - share) * large**share), _per_layer("gemma-3-270m", 0.2)["score"]
