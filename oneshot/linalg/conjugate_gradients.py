"""Preconditioned conjugate gradients for a matrix of unknowns."""

from collections.abc import Callable

import torch

Map = Callable[[torch.Tensor], torch.Tensor]


def conjugate_gradients(right: torch.Tensor, product: Map, precondition: Map, *, steps: int) -> torch.Tensor:
    """Return `X` after `steps` steps from zero towards `product(X) = right` (Hestenes and Stiefel 1952).

    Early stopping regularises; later steps fit noise.

    Args:
        right: `(m, n)`. product, precondition: linear, symmetric and positive semi-definite in `⟨X, Y⟩ = Σ Xᵢⱼ Yᵢⱼ`;
            the second stands for the first's inverse.

    Cost: `steps` products and as many preconditionings. Stops before where a direction costs nothing.
    """
    solution, residual = torch.zeros_like(right), right
    direction = conjugate = precondition(residual)
    energy = _inner(residual, conjugate)
    for step in range(steps):
        curved = product(direction)
        curvature = _inner(direction, curved)
        if not (curvature > 0 and energy > 0):  # also if one is not a number
            break
        length = energy / curvature
        solution = solution + length * direction
        if step + 1 == steps:
            break
        residual = residual - length * curved
        conjugate = precondition(residual)
        previous, energy = energy, _inner(residual, conjugate)
        direction = conjugate + (energy / previous) * direction
    return solution


def _inner(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left * right).sum(dtype=torch.float64))
