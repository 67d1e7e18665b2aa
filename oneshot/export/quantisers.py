"""ggml's quantised types: which a row can have, their bits, and their real rounding, by the package libgguf."""

import importlib.util
import math
from typing import Any

import numpy as np

from oneshot.errors import PlanError

FLOAT, FLOAT_SECONDS = "F16", 2.0  # of rows that no block divides
# Types with blocks of 32 and of 256 values, which rows must be a multiple of, and the CPU seconds of a weight in
# llama.cpp, prefill and decoding, each ÷ F16's, added (benchmarks/types_speed.py --pure). Q5_1 and Q4_1 are slow, and
# left out.
TYPES = {
    "Q8_0": 1.91,
    "Q6_K": 1.20,
    "Q5_K": 1.23,
    "Q5_0": 2.25,
    "Q4_K": 1.25,
    "Q4_0": 1.09,
    "IQ4_NL": 1.13,
    "IQ4_XS": 1.16,
    "Q3_K": 1.25,
    "IQ3_S": 1.90,
    "IQ3_XXS": 1.69,
    "Q2_K": 1.38,
    "IQ2_S": 1.48,
    "IQ2_XXS": 1.48,
}


def refuse_without_quantisers() -> None:
    """Raise `PlanError` if nothing can be quantised, because the package is not there."""
    if importlib.util.find_spec("libgguf") is None:
        raise PlanError("--bits and --max-file-size need the package libgguf; run pip install 'oneshot-llm[quantise]'.")


def types_of(columns: int) -> tuple[str, ...]:
    """Return the types that rows of so many values can have, and F16 where no block divides them."""
    fitting = tuple(name for name in TYPES if columns % block_of(name) == 0)
    return fitting or (FLOAT,)


def seconds_of(shape: tuple[int, ...], name: str) -> float:
    """Return the CPU seconds of a matrix in a type; prefill and decoding take one each for a weight in F16."""
    return math.prod(shape) * TYPES.get(name, FLOAT_SECONDS)


def block_of(name: str) -> int:
    """Return the values of a block of a type; 1 of F16."""
    import gguf

    return int(gguf.GGML_QUANT_SIZES[_kind(name)][0])


def bytes_of(shape: tuple[int, ...], name: str) -> int:
    """Return the bytes of a tensor in a type; its rows must be whole blocks."""
    import gguf

    values, size = gguf.GGML_QUANT_SIZES[_kind(name)]
    return int(np.prod(shape)) // values * size


def quantise(rows: np.ndarray, name: str, importance: np.ndarray | None) -> np.ndarray:
    """Round float32 rows `(m, n)` to a type -> `(m, bytes)` uint8, or float16.

    Args:
        importance: mean squares `(n,)` of what the columns are multiplied with, by which errors are weighed; None: none
            are known.
    """
    if name == FLOAT:
        return rows.astype(np.float16)
    import libgguf

    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    quantised: np.ndarray = libgguf.quantize_rows(np.ascontiguousarray(rows, np.float32), _kind(name), weights)
    return quantised


def read_rows(stored: np.ndarray, name: str, columns: int) -> np.ndarray:
    """Return what an engine reads of rows `(m, bytes)` that `quantise` returned, `(m, columns)` float32."""
    if name == FLOAT:
        return stored.astype(np.float32)
    import libgguf

    read: np.ndarray = libgguf.dequantize_rows(stored, _kind(name), n_per_row=columns)
    return read


def rounded(rows: np.ndarray, name: str, importance: np.ndarray | None) -> np.ndarray:
    """Return what an engine reads of float32 rows `(m, n)` that were rounded to a type, in float32."""
    return read_rows(quantise(rows, name, importance), name, rows.shape[1])


def usable_importance(importance: np.ndarray | None) -> np.ndarray | None:
    """Return importance without zeros, which would leave columns to chance; None if all are."""
    if importance is None or not importance.any():
        return None
    return importance + 1e-6 * float(importance.mean())


def _kind(name: str) -> Any:
    import gguf

    return gguf.GGMLQuantizationType[name]
