"""Least-squares corrections of the downs of experts, each by the statistics of its own tokens.

A device solves several at once, because one is too small to fill it.
"""

from collections.abc import Sequence

import torch
from oneshot_kernels import columns_without

from oneshot.compression.correction import Factors, correct, energies_of
from oneshot.compression.expert_statistics import ExpertStatistics
from oneshot.linalg.psd import cholesky_together, condition_numbers, solve_with
from oneshot.method import Correction

MOST_TOGETHER = 8
MOST_NUMBERS = 2**26  # in the downs of those that are solved at once


def solved_together(size: int, output_size: int, device: torch.device) -> int:
    """Return how many experts with downs `(output_size, size)` are solved at once."""
    return 1 if device.type == "cpu" else max(1, min(MOST_TOGETHER, MOST_NUMBERS // (size * output_size)))


def correct_experts(
    downs: torch.Tensor,
    kept: torch.Tensor,
    statistics: ExpertStatistics,
    experts: Sequence[int],
    *,
    correction: Correction,
    dampings: Sequence[float],
    residual_weights: Sequence[float],
) -> list[Factors]:
    """Return the downs of experts over their kept neurons, as `correct` returns that of one.

    Args:
        downs: `(b, D, m)` of these experts. kept: int64 `(b, m')`. statistics: of a group that has them.
        correction, dampings, residual_weights: as in `correct`, of each.
    """
    if len(experts) > 1 and correction in ("same-layer", "two-stream"):
        weights = torch.tensor(residual_weights, dtype=torch.float64) * (correction == "two-stream")
        found = _solved(downs, kept, statistics, experts, torch.tensor(dampings, dtype=torch.float64), weights)
        if found is not None:
            return found
    return [
        correct(down, columns, statistics.of(expert), correction=correction, damping=damping, residual_weight=weight)
        for down, columns, expert, damping, weight in zip(downs, kept, experts, dampings, residual_weights, strict=True)
    ]


def _solved(
    downs: torch.Tensor,
    kept: torch.Tensor,
    statistics: ExpertStatistics,
    experts: Sequence[int],
    dampings: torch.Tensor,
    residual_weights: torch.Tensor,
) -> list[Factors] | None:
    """Solve several at once; None if the Gram of one needs a larger ridge, which `correct` finds."""
    places = torch.tensor([statistics.group.index(expert) for expert in experts]).to(kept.device)
    at, rows = places.view(-1, 1, 1), kept.unsqueeze(2)
    rest = columns_without(kept, downs.shape[2])
    factors = cholesky_together(statistics.grams[at, rows, kept.unsqueeze(1)], dampings.to(kept.device))
    if factors is None:
        return None
    coefficients = solve_with(factors, statistics.grams[at, rows, rest.unsqueeze(1)].double())
    dense = downs.double()
    weights = _columns(dense, kept).baddbmm_(_columns(dense, rest), coefficients.mT)
    if statistics.residuals is not None and residual_weights.any():
        steps = solve_with(factors, statistics.residuals[places.unsqueeze(1), kept].double())
        weights += residual_weights.to(kept.device).view(-1, 1, 1) * steps.mT
        del steps
    conditions = condition_numbers(factors, "kept columns")
    del factors
    residuals = None if statistics.residuals is None else statistics.residuals[places]
    grams, residual_energies = statistics.grams[places], statistics.residual_energies[places]
    energies = torch.stack(energies_of(dense, weights, kept, grams, residuals, residual_energies), dim=1)
    largest = coefficients.abs().amax((1, 2)) if coefficients.numel() else torch.zeros(len(kept))
    return [
        Factors(columns, weight, None, condition, coefficient, damping=damping, energies=own)
        for columns, weight, own, condition, coefficient, damping in zip(
            kept, weights, energies, conditions, largest.tolist(), dampings.tolist(), strict=True
        )
    ]


def _columns(matrices: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return columns `(b, k)` of `matrices (b, D, m)`."""
    return matrices.gather(2, columns.unsqueeze(1).expand(-1, matrices.shape[1], -1))
