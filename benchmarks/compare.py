"""A paired test between two sets of rows: the same windows, the same seeds, with and without a part."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from harness import Row
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean difference of the loss of two models, in nats per token: the difference of the scores' logarithms.

    Attributes:
        mean, standard_error: mean difference over windows and seeds. low, high: its 95 % interval.
        p: probability of a mean at least as far from 0 if there is no difference.
        by_seed: the mean difference over the windows for each seed, which shows the spread.
    """

    mean: float
    standard_error: float
    low: float
    high: float
    p: float
    by_seed: tuple[float, ...]

    @property
    def is_real(self) -> bool:
        """Return whether the interval leaves out 0."""
        return not self.low <= 0 <= self.high


def paired_difference(differences: np.ndarray) -> Difference:
    """Return the mean of paired differences, with an interval for other windows and other seeds.

    Windows and seeds are both random effects, each crossed with the other, because one seed moves all windows together
    and one window is hard for all seeds. The variance of the mean is estimated from the mean squares of the two-way
    analysis of variance, and its degrees of freedom as in Satterthwaite (1946), Biometrics Bulletin 2, equation 17.
    A mean square below the residual's counts as the residual's, so no component is negative. With one seed this is
    the paired t-test over the windows.

    Args:
        differences: float64 `(seeds, windows)`, loss with the part − loss without it, at least two windows.

    Raises `ValueError` for fewer than two windows.
    """
    seeds, windows = differences.shape
    if windows < 2:
        raise ValueError(f"A paired test needs at least two windows, not {windows}; judge the models on more.")
    mean = float(differences.mean())
    of_seeds, of_windows = differences.mean(1), differences.mean(0)
    squares = [seeds * float(of_windows.var(ddof=1))]
    degrees = [windows - 1]
    total = squares[0]
    if seeds > 1:
        rest = differences - of_seeds[:, None] - of_windows[None, :] + mean
        rest_degrees = (seeds - 1) * (windows - 1)
        of_rest = float((rest**2).sum()) / rest_degrees
        squares = [max(squares[0], of_rest), max(windows * float(of_seeds.var(ddof=1)), of_rest), of_rest]
        degrees += [seeds - 1, rest_degrees]
        total = squares[0] + squares[1] - of_rest
    error = math.sqrt(total / (seeds * windows))
    if error == 0:  # the same difference everywhere
        return Difference(mean, 0.0, mean, mean, float(mean == 0), tuple(of_seeds.tolist()))
    freedom = total**2 / sum(square**2 / count for square, count in zip(squares, degrees, strict=True))
    low, high = stats.t.interval(CONFIDENCE, freedom, loc=mean, scale=error)
    p = 2 * stats.t.sf(abs(mean) / error, freedom)
    return Difference(mean, error, float(low), float(high), float(p), tuple(of_seeds.tolist()))


def compare_rows(with_part: Sequence[Row], without: Sequence[Row]) -> Difference | None:
    """Return the paired difference of two sets of rows, over the seeds that both have.

    None if no pair of rows has `window_losses`, which rows before 2026-11-24 lack. Raises `ValueError` if two rows were
    judged on different windows.
    """
    pairs = []
    others = {row["seed"]: row for row in without if "window_losses" in row}
    for row in with_part:
        other = others.get(row["seed"])
        if other is None or "window_losses" not in row:
            continue
        if row.get("texts") != other.get("texts"):
            raise ValueError(f"The rows of seed {row['seed']} were judged on different windows; measure both again.")
        pairs.append((_losses(row), _losses(other)))
    if not pairs:
        return None
    return paired_difference(np.array([one - other for one, other in pairs]))


def _losses(row: Row) -> np.ndarray:
    """Return the losses of all windows of all texts, in the order of the texts' names."""
    return np.concatenate([np.array(row["window_losses"][text]) for text in sorted(row["window_losses"])])
