"""Matrices for property tests, and every numerical tolerance of the suite in one table."""

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

Matrix = npt.NDArray[np.float64]

EPS64 = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)

TOLERANCES = {
    # A float64 solve against another algorithm, relative, times the condition number of the system.
    "solve": 1e3 * EPS64,
    # ‖A − A_J T‖ ÷ ‖A‖ for A of exact rank k, T from A itself.
    "rank": EPS64**0.75,
    # The same with T from the Gram: AᵀA squares the condition number, so half of the digits are lost.
    "rank from gram": EPS64 ** (0.75 / 2),
    # Sums of products in float32, relative to the largest entry.
    "float32 sums": 1e3 * EPS32,
    # Relative errors from float32 Grams: a difference of squares, so the root of the sums' rounding.
    "float32 error": (1e2 * EPS32) ** 0.5,
    # One float32 layer against transformers' own forward pass, which adds in another order.
    "float32 layer": 1e-4,
    # Logits of a model folded without loss, Grams in float32.
    "float32 fold": 2e-3,
    # A perplexity against transformers' own loss.
    "perplexity": 1e-4,
}


def low_rank_plus_noise(rng: np.random.Generator, rows: int, columns: int, *, rank: int, noise: float = 1e-3) -> Matrix:
    left, right = rng.standard_normal((rows, rank)), rng.standard_normal((rank, columns))
    return left @ right + noise * rng.standard_normal((rows, columns))


def exact_rank(rng: np.random.Generator, rows: int, columns: int, *, rank: int) -> Matrix:
    """Rank `rank` to rounding, singular values from 1 down to 1e-2."""
    left, _ = np.linalg.qr(rng.standard_normal((rows, rank)))
    right, _ = np.linalg.qr(rng.standard_normal((columns, rank)))
    return left * np.logspace(0, -2, rank) @ right.T


def graded(rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    """Columns whose sizes fall over four decades, in random order."""
    return rng.standard_normal((rows, columns)) * rng.permutation(np.logspace(0, -4, columns))


def with_duplicates_and_zeros(rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    matrix = rng.standard_normal((rows, columns))
    matrix[:, 1] = matrix[:, 0]
    matrix[:, 2] = 0
    return matrix


@st.composite
def matrices(draw: st.DrawFn, *, min_columns: int = 4, max_columns: int = 24) -> Matrix:
    """`(rows, columns)`, rows ≥ columns: plain, low rank plus noise, duplicate and zero columns, or graded."""
    columns = draw(st.integers(min_columns, max_columns))
    rows = columns * draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    kind = draw(st.sampled_from(("plain", "low rank", "duplicates", "graded")))
    if kind == "plain":
        return rng.standard_normal((rows, columns))
    if kind == "low rank":
        return low_rank_plus_noise(rng, rows, columns, rank=max(1, columns // 3))
    if kind == "duplicates":
        return with_duplicates_and_zeros(rng, rows, columns)
    return graded(rng, rows, columns)


@st.composite
def psd(draw: st.DrawFn) -> Matrix:
    """A Gram matrix of one of `matrices`."""
    matrix = draw(matrices())
    return matrix.T @ matrix
