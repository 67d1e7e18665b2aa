"""Table of the loss by the size of a model: a power law through two measured models, and what it predicts of others."""

import math
from collections.abc import Callable
from functools import partial

from harness import Row, read_rows

from tables.cells import markdown
from tables.gpu_measured import rows_of
from tables.gpu_quality import default_row
from tables.other_tools import default_curves

SMALL, LARGE = "SmolLM2-135M", "Qwen2.5-Coder-0.5B"
MEASURED = {SMALL: 134.5e6, LARGE: 494.0e6}  # stored parameters
PREDICTED = {"1.5B": 1.54e9, "7B": 7.6e9}
SIZES = (0.1, 0.2, 0.3)


def by_size_table() -> str:
    """Return the scores of two models by form and removed share, the exponent between them, and predicted scores."""
    stock = {row["asked"]: row for row in default_curves()["stock"]}
    lines = []
    measured: dict[str, tuple[Callable[[float], Row], ...]] = {  # of the small model and of the large one
        "per-layer": (partial(default_row, SMALL), partial(default_row, LARGE)),
        "stock": (stock.__getitem__, _stock_of_coder),
    }
    for form, models in measured.items():
        for size in SIZES:
            losses = [math.log(row_of(size)["score"]) for row_of in models]
            exponent = -math.log(losses[1] / losses[0]) / math.log(MEASURED[LARGE] / MEASURED[SMALL])
            scores = [math.exp(losses[1] * (MEASURED[LARGE] / size) ** exponent) for size in PREDICTED.values()]
            lines.append([form, f"{size:.0%}", *(f"{math.exp(loss):.3f}" for loss in losses), f"{exponent:.2f}"])
            lines[-1] += [f"*{score:.2f}*" for score in scores]
    gemma = _gemma()
    return markdown(
        ["form", "removed", SMALL, LARGE, "exponent", *(f"{name}, predicted" for name in PREDICTED)],
        lines,
        "Score: perplexity ÷ dense, geometric mean over five kinds of text. The logarithm of the score falls as "
        "parameters to the power of −exponent. **Predicted from two models alone, of different makers and with equal "
        "tokens of calibration (131,072), so with fewer for each neuron of the larger one**: how far off such a line "
        f"can be is seen on Gemma 3 270M, per-layer −20 %, where it says {gemma[0]:.2f} and {gemma[1]:.2f} was "
        "measured. The coder's stock rows calibrate on general.jsonl alone.",
    )


def _stock_of_coder(size: float) -> Row:
    wanted = {"section": "quality, coder, stock", "recipe": "oneshot", "asked": size}
    return [row for row in rows_of("quality") if wanted.items() <= row.items()][-1]


def _gemma() -> tuple[float, float]:
    """Return the score of Gemma 3 270M by the line through both models, and as measured."""
    dense = [row for row in read_rows("models") if (row["model"], row["recipe"]) == ("gemma-3-270m", "dense")]
    parameters = dense[-1]["stored_parameters"]
    small, large = (math.log(default_row(name, 0.2)["score"]) for name in MEASURED)
    share = math.log(parameters / MEASURED[SMALL]) / math.log(MEASURED[LARGE] / MEASURED[SMALL])
    return math.exp(small ** (1 - share) * large**share), default_row("gemma-3-270m", 0.2)["score"]
